"""Several axes of ranks at once, beside one device."""
