"""Messages between processes: ``structure.py`` encodes one, ``bridge.py`` gives tensors' memory."""
