"""Checks whether a schedule or a plan can run: complete, in order, deadlock-free, within memory.

Begin with ``schedule.py`` and ``plan.py``; ``envelope.py`` says what a rank may run early. It
imports values, families, explanations and players; faces and the registry import it.
"""
