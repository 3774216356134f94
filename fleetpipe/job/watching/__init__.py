"""The watch over the other ranks: which failed and why, told to all within milliseconds."""
