"""Files as Paddle and Fleet write them: state dicts, and folders with a file for each layer.

Start with ``states.py``; ``pickled.py`` reads its pickles and runs none of the functions that they
name. ``manifest.py`` has the names of the files of a folder, and records which save they belong
to.
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
