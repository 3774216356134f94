"""The pages of a run, its charts and tables, and the server of a board."""
