"""``auto``: a greedy search for the best schedule under a memory cap. Start with ``auto.py``."""
