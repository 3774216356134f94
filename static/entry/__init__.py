"""Where a user's script comes in: the optimizer, the data loader, what is patched in Paddle."""
