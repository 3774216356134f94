"""From a user's program to stages: which operation belongs where, and what crosses between.

Start with ``split.py``. Knows numbers and names, none of Paddle's values.
"""
