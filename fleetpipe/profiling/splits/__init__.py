"""What layers cost where sequences, or experts, are split in another way than they were measured.

Begin with ``degrees.py``; ``slice_lengths.py`` is about the slices of a schedule.
"""
