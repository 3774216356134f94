"""``fleetpipe launch``: starts a job under Paddle's launcher, and restarts it if it fails.

Start with ``supervisor.py``; ``attempts.py`` has the rules. The supervisor loads no Paddle:
Paddle's launcher runs in a process of its own, ``pod_server.py``, once for each attempt.
"""
