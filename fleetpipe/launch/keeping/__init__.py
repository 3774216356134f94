"""The state of every step in the host's memory, which no death of a rank ends.

Start with ``kept_state.py``, the part of a rank. Who lets ranks keep their state is the supervisor.
"""
