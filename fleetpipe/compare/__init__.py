"""Compares trainings: what is equal, what is rounding, and where whole runs of a script part.

``differences`` has the rule of all comparisons, ``rounding`` what another order of sums explains:
parity, the proof of a capture, the shadow, guards and the locator measure by them.

``fleetpipe parity --whole`` starts with ``whole``, which runs a script in several ``ways``, some of
them under other ``strategies``. In each process of one the ``recorder`` writes the ``trail`` of the
run, and ``written`` has what it leaves beside. Two trails are aligned, and the first event that
differs is named.
"""
