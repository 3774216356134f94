"""Shows a job while it runs: the state of its ranks, and which of them is slow.

``job/records.py`` defines the record that each rank sends; ``board.py`` combines the records to the
state of the job, and ``slow_ranks.py`` names the slow ranks. ``server.py`` and ``watch_command.py``
show a board. No Paddle is needed: ``job`` sends the records, the launcher serves.
"""
