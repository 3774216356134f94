"""Whether a schedule or a plan can run: complete, in order, free of deadlock, within memory."""
