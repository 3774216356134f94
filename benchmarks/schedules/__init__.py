"""What schedules cost and bring: compared by simulation, and trained."""
