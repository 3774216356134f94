"""The state of every step in the memory of hosts, which no death of a rank ends.

Start with ``kept_state.py``, the part of a rank, which writes into a ``segment.py``. Supervisors
own these: ``copies.py`` is a host's part in copying them to a neighbour, ``rounds.py`` and
``places.py`` decide for all hosts what is copied, and who gives it back to whom. What a supervisor
imports loads no Paddle.
"""
