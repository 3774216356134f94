"""Simulates a schedule: its times, the memory it holds, and the plan that the engine runs.

Begin with ``replay.py``, which says when each entry begins and ends. It imports values and
explanations; checks, forms, the search and faces import it.
"""
