"""Compares whole runs of a script by their trails: what each call returned and left behind.

``fleetpipe parity --whole`` starts with ``whole``, which runs a script in several ``ways``. In each
process of one (``recorded_script``) the ``recorder`` writes the ``trail`` of the run; ``written``
has what it leaves beside. ``comparison`` aligns two trails and names the first event that differs.
"""
