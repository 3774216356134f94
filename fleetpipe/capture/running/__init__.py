"""Runs the nodes of a capture again, a stage at a time, on this process's tensors."""
