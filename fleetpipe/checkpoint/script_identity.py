"""Which script saves, and with which arguments: a checkpoint tells a run of another one."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def current_script() -> dict[str, str]:
    """Returns the name of the script that runs, and a digest of its arguments.

    Empty where no script of the user's was started: in a notebook, under ``-c``, in a worker of
    another program, as Ray's.
    """
    file, *arguments = sys.argv or [""]
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file() or Path(sys.prefix) in path.parents:
        return {}
    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
    return {"name": path.name, "arguments": digest}
