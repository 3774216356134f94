"""Batches of other forms than the example: with inputs left out, of other sizes."""
