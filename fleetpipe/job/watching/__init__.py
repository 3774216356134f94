"""Watches the other ranks: which failed and why, known on all ranks within milliseconds."""
