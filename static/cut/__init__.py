"""From a user's program to stages: which operation belongs where, and what crosses between.

Start with ``split.py``; ``contract.py`` is what readers and runs know of one another, ``names.py``
the variables that they exchange. It knows
numbers and names, no operation of Paddle's. It imports the ground; ``ir``, ``run`` and ``entry``
import it.
"""
