"""Generates tokens with a pipeline: ``fleetpipe.generate``, and a callback that logs samples.

Start with ``decoding.py``; ``sampling.py`` chooses a token from logits.
"""
