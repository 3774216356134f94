"""Cuts a capture into stages by the `split_spec` or by measured costs.

It also finds the values that cross the borders between stages.
"""
