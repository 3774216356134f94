"""What schedules cost and bring: built, compared by simulation, and trained."""
