"""Stores the state of every step in this host's memory, which survives the death of a rank.

Start with ``kept_state.py``, the part of a rank, which writes into a folder of the supervisor's.
"""
