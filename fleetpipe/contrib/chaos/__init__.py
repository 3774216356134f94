"""Kills or stops a rank in every attempt of a job, to test that the job recovers."""
