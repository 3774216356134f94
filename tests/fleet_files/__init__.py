"""Files as Paddle and Fleet write them."""
