"""Checkpoints of other programs, and conversion of any to any.

Each format has a reader, which makes a ``contents.Checkpoint`` of files, and a writer, which
makes files of one; ``convert.py`` has the table of them, and is where to start. ``name_map.py``
gives tensors other names. They are read when they are written, one after another.

``load.py`` gives them to a job as they are.
"""
