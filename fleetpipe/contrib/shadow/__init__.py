"""A plain model that trains beside the first batches of its pipeline."""
