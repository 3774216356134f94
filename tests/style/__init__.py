"""Tests of how the code is written: its words and its types."""
