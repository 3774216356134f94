"""What a checkpoint holds of a run, and whose it is: model, optimizer, schedules, random states."""
