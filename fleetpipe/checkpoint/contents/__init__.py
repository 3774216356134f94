"""The state that a checkpoint holds: model, optimizer, schedules, random states."""
