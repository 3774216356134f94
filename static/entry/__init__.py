"""The entry points of a user's script: the optimizer, the data loader, and hooks in Paddle.

Start with ``optimizer.py``, whose ``minimize`` creates a pipeline, and with ``patches.py``, which
makes ``Executor.run`` run it.
"""
