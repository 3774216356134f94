"""Names of older Paddle."""
