"""Runs a model's forward once, and records its calls, their order and their values.

Start with ``value``, which defines a capture, and ``tracer.record``, which makes one.
"""
