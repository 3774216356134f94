"""Callbacks that log by epoch, watch a loss, or write to trackers of experiments."""
