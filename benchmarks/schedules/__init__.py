"""What schedules cost and bring: built, searched for, compared by simulation, and trained."""
