"""The plain model beside its pipeline."""
