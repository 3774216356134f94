"""Observers of running stages: hooks, timers, checks for NaN, and measured costs.

``hooks.py`` and ``refusals.py`` observe batches; ``profile.py`` measures costs: start there.
"""
