"""Observers of running stages: hooks, timers, checks for NaN, and measured costs."""
