"""Tests of ``fleetpipe.contrib.why``."""
