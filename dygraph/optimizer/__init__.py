"""The optimizer of a pipeline: global norms, sharded state, loss scaling and replicas.

Start with ``optimizer.py``.
"""
