"""The user's wrapper: ``train_batch``, ``eval_batch``, ``predict_batch``, and what they run.

Start with ``pipeline_parallel.py``. The wrapper has a ``Runtime``, which lives across batches; a
batch is a ``TrainingBatch``, or runs within ``run_forwards``.
"""
