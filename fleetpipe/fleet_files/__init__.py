"""Files as Paddle and Fleet write them: state dicts, and folders with a file for each layer.

Start with ``states.py``; ``pickled.py`` reads its pickles without running what they name.
``layers.py`` has the names of the files of a folder, and ``manifest.py`` says of which save they
are.
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
