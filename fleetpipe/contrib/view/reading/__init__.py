"""What a run leaves: boards and their history, the files of its folder, traces."""
