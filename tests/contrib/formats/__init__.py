"""Checkpoints of other programs, mirroring ``fleetpipe.contrib.formats``."""
