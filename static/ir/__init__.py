"""The readers of Paddle's two program representations: ``pir`` (3.3) and ``program`` (2.6.2)."""
