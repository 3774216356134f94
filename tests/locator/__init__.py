"""Tests of fleetpipe.locator."""
