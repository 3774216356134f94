"""What watches the stages while they run: hooks, timers, checks for NaN, guards, measured costs.

Entered by: ``finite``, ``guards``, ``hooks``, ``layer_meter``, ``profile``, ``timers``.
"""
