"""The job: which processes take part, how they meet, watch each other and end.

Start with ``job.py``, what lasts from ``fleet.init`` to ``fleet.shutdown``; ``mesh_groups.py`` says
which ranks share what. The package imports transports alone; both graph modes and ``fleet`` use it.
"""
