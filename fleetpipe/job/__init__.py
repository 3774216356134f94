"""The job: which processes take part, how they meet, watch each other and end.

Start with ``job.py``: a job lasts from ``fleet.init`` to ``fleet.shutdown``; ``mesh_groups.py`` has
the groups of its ranks. The package imports transports and meshes; both graph modes and ``fleet``
use it.
"""
