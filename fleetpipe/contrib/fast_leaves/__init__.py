"""Runs leaf layers whose backward is not split faster on CPUs, with the same bits."""
