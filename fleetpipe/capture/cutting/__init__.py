"""Cuts a capture by the `split_spec` or by measured costs, and finds what crosses borders."""
