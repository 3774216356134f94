"""Reads and writes files as Paddle and Fleet do: state dicts, and folders of a file for each layer.

Start with ``states.py``; ``pickled.py`` reads its pickles without running the functions that they
name. ``manifest.py`` has the names of the files in a folder of layers, and records which save each
file belongs to.
"""

from fleetpipe.fleet_files.states import (
    arrays,
    counted_names,
    load,
    mapped,
    record,
    save,
    save_all,
)

__all__ = ["arrays", "counted_names", "load", "mapped", "record", "save", "save_all"]
