"""Names and arguments of older Paddle, for scripts that were written for it."""
