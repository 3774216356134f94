"""``fleetpipe doctor``: checks what this machine can do, measures it, and names what is wrong.

Start with ``doctor_command.py``. It checks Paddle and its device; ``host.py`` checks the host
without Paddle; ``ranks.py`` starts some ranks of ``worker.py``, which measure each transport and
compare bits; ``cluster_checks.py`` checks the nodes of a Ray cluster.
"""
