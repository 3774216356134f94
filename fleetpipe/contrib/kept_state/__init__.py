"""The state of every step in the memory of this host, which no death of a rank ends.

Start with ``kept_state.py``, the part of a rank, which writes into a folder of the supervisor's.
"""
