"""Trains the plain model beside the first batches of its pipeline, and compares the two."""
