"""Assigns the operations of a user's program to stages, and finds the values that cross.

Start with ``split.py``; ``contract.py`` is the interface between readers and runs,
``scope_names.py`` the variables that they exchange. It works with numbers and names, not with
Paddle's operations. ``ir``, ``run`` and ``entry`` import it.
"""
