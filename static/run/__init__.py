"""Running a cut program: feeds, fetches, executors, reductions. Start with ``pipeline.py``."""
