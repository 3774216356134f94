"""Messages between processes: ``structure.py`` describes one, ``bridge.py`` reads its tensors."""
