"""``fleetpipe launch``: starts a job under Paddle's launcher, and starts it again where it fails.

Start with ``supervisor.py``; ``attempts.py`` has the rules. It loads no Paddle: that is in
``pod_server.py``, a process of its own in which Paddle's launcher runs, once for each attempt.
"""
