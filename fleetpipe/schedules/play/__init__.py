"""Playing a schedule: as integers, against costs, and lowered to a plan.

Start with ``replay.py``. Checks, forms and searches stand on it.
"""
