"""Checkpoints of other programs, mirroring ``fleetpipe.checkpoint.formats``."""
