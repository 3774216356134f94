"""The optimizer of a pipeline: global norms, sharded state, loss scaling and replicas.

Start with ``optimizer.py``.

Entered by: ``clip_global``, ``optimizer``, ``replicas``, ``scaler``, ``shards``.
"""
