"""Which rank is slow, and where the time of steps goes."""
