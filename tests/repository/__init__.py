"""What the repository says of itself: documentation, manifests, benchmarks, packages."""
