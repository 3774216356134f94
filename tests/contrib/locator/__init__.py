"""Tests of fleetpipe.contrib.locator."""
