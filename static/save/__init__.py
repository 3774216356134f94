"""Parameters and programs of a static pipeline, saved and loaded."""
