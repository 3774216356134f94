"""The job: which processes take part, how they meet, watch each other and end.

Start with ``job.py``: what a process takes part in between ``fleet.init`` and ``fleet.shutdown``.
It imports transports alone; both graph modes and ``fleet`` use it.
"""
