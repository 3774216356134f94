"""Cuts a capture where the user or the costs of its nodes say, and finds what crosses."""
