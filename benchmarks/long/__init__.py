"""Benchmarks that take longer than all others together."""
