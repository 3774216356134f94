"""Runs a program that was cut: feeds, fetches, executors, and sums over ranks.

Start with ``pipeline.py``, which ``Executor.run`` calls. The engine runs ``static_stage.py``. This
package imports the cut and no representation: it gets native programs from a ``StageProgram``.
"""
