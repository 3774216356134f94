"""The job: which processes take part, how they meet, watch each other and end.

Start with ``job.py``: what a process takes part in between ``fleet.init`` and ``fleet.shutdown``.
It stands on transports alone; both graph modes, ``fleet`` and what is above them use it.
"""
