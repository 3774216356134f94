"""One run of a model's forward, noted: what was called, in which order, on which values."""
