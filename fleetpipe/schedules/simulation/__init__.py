"""What becomes of a schedule: its times, what is held, and the plan that the engine runs.

Begin with ``replay.py``, which says when each entry begins and ends. It imports values and
explanations; checks, forms, the search and faces import it.
"""
