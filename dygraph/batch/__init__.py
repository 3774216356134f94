"""One batch: cuts it into micro-batches, runs them in a stage, weights their losses, joins outputs.

Start with ``dygraph_stage.py``, which the engine runs.
"""
