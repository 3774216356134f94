"""Paddle's two representations of programs: ``pir`` (3.3) and ``program`` (2.6.2).

``readers.py`` picks the one of a program. Each has a reader, which describes programs, a stage,
which builds native programs of one stage, and a file of single operations; ``backward.py`` is
common to both. It imports the cut, but nothing that runs programs.
"""
