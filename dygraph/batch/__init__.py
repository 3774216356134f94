"""One batch: cut into micro-batches, run by a stage, weighed into a loss, put together again.

Start with ``stage.py``, which the engine runs.
"""
