"""Fast leaves."""
