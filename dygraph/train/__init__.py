"""The user's wrapper: ``train_batch``, ``eval_batch``, ``predict_batch``, and what they run.

Start with ``pipeline_parallel.py``. The wrapper holds a ``Runtime``, which stands ready between
batches; a batch is a ``TrainingBatch``, or runs within ``forwarded``.
"""
