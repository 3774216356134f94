"""Pictures of schedules, runs, profiles and captured models."""
