"""Shows a run: ``fleetpipe watch``, ``fleetpipe report`` and ``fleetpipe why``.

``reading`` reads what a run leaves: its board (``board.py``) and history, the files of its folder
(``run_folder.py``), a trace (``traced_ops.py``). ``judging`` has the questions that somebody asks
of a run and their answers (``answers.py``), finds slow ranks while it runs (``slow_ranks.py``) and
stragglers in a trace (``slowdown.py``; the definitions are those of the what-if analysis of
arXiv:2505.05713). ``showing`` has the pages, live or saved, the server, and the metrics for
Prometheus. ``reporting.py`` runs on the first rank of a job and writes the board. No Paddle is
needed.
"""
