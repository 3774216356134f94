"""What watches the stages while they run: hooks, timers, checks for NaN, guards, measured costs.

Entered by: ``early_recompute``, ``finite``, ``guards``, ``hooks``, ``layer_meter``, ``profile``,
``timers``.
"""
