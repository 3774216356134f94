"""Runs a model's forward once and records its calls, their order and their values."""
