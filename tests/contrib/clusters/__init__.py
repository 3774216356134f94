"""Estimates for clusters that are not there."""
