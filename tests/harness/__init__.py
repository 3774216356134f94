"""Tests of what tests are started with: launched and forked processes."""
