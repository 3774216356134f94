"""One batch: cut into micro-batches, run by a stage, weighed into a loss, put together again.

Start with ``stage.py``, which the engine runs.

Entered by: ``chunk_weights``, ``companion``, ``input_gradients``, ``kept_for_loss``, ``losses``,
``micro_batches``, ``outputs``, ``row_digests``, ``slicing``, ``stage``, ``token_weights``.
"""
