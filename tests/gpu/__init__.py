"""What fleetpipe does on a GPU, shown by a CPU that says it is one (tests/gpu/pretending.py)."""
