"""What watches the stages while they run: hooks, timers, checks for NaN, measured costs.

Entered by: ``finite``, ``hooks``, ``layer_meter``, ``profile``, ``timers``.
"""
