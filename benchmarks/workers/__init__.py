"""What the benchmarks train, and the processes that they start and measure.

Start at ``gpt.py``, the stack of blocks that most of them train.
"""
