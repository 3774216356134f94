"""Compares trainings: what is equal, what is rounding, and where whole runs of a script part.

``differences`` has the rule of all comparisons, and what another order of sums explains: parity,
the proof of a capture, the shadow, guards and the locator measure by it.

``fleetpipe parity --whole`` starts with ``whole_runs``, which runs a script in several ways, some
of them under other strategies. Each process of one writes the ``trail`` of its run, and what it
leaves beside. Two trails are aligned, and the first event that differs is named.
"""
