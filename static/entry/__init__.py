"""Where a user's script comes in: the optimizer, the data loader, what is changed in Paddle.

Start with ``optimizer.py``, whose ``minimize`` makes a pipeline, and with ``patches.py``, which
leads ``Executor.run`` to it. Only the face of static graph imports it.
"""
