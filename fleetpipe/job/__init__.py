"""The job: which processes take part, how they meet, watch each other and end.

Start with ``job.py``: what a process takes part in between ``fleet.init`` and ``fleet.shutdown``.
It stands on transports alone; both graph modes, ``fleet`` and what is above them use it.

Entered by: ``agreement``, ``attempt_files``, ``groups.neighbours``, ``groups.topology``,
``groups.workers``, ``job``, ``meeting``, ``reporting``, ``slurm``, ``start``, ``watching.failure``,
``watching.process_exit``, ``watching.watch``.
"""
