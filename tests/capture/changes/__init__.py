"""What a script changes on a model after its pipeline was made, and what calls leave in it."""
