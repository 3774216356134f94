"""The user's wrapper: ``train_batch``, ``eval_batch``, ``predict_batch``, and what they run.

Start with ``pipeline_parallel.py``.
"""
