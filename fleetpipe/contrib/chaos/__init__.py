"""Kills or stops a rank in every attempt of a job, so that its recovery is tried."""
