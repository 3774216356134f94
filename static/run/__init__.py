"""Runs a program that was cut: feeds, fetches, executors, and sums over ranks.

Start with ``pipeline.py``, which ``Executor.run`` calls. The engine runs ``static_stage.py``. This
package imports the cut and neither representation: a ``StageProgram`` gives it Paddle's programs.
"""
