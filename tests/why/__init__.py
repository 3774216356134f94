"""Tests of ``fleetpipe.why``."""
