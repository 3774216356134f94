"""Checks between ranks."""
