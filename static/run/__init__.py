"""Running a program that was cut: feeds, fetches, executors, what ranks add up together.

Start with ``pipeline.py``: what ``Executor.run`` does. ``stage.py`` is what the engine runs. It
imports the cut and the ground, and no representation: native programs come in by the contract.
"""
