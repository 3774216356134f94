"""Predicts layers' costs if sequences or experts are split in another way than measured.

Begin with ``degrees.py``; ``slice_lengths.py`` is about the slices of a schedule.
"""
