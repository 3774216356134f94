"""Compares tensors, and whole runs of a script: equal, equal to rounding, or different.

Start with ``differences``, which measures how far two tensors are apart: parity, the proof of a
capture, the shadow, guards and the locator call it.

``fleetpipe parity --whole`` starts with ``whole_runs``, which runs a script in several ways, some
of them under other strategies. Each process writes a ``trail``, one event for each call. Two trails
are compared event by event, and the first event that differs is named.
"""
