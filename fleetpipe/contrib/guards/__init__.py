"""Checks on every batch that ranks have the same bits where they must."""
