"""Tokens of the libraries' pipelines."""
