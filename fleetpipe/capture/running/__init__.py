"""The nodes of a capture run again, a stage at a time, on the tensors that are here."""
