"""Runs ``fleetpipe launch`` as a user does, within a limit, and misses no process of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.launching import Finished, script_file

_COMMAND = """
    import json, subprocess, sys
    command = [sys.executable, "-m", "fleetpipe", *json.loads(sys.argv[1])]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    print(json.dumps([done.returncode, done.stdout.decode(), done.stderr.decode()]))
    """


class Told(NamedTuple):
    """What a command has told: its exit code, and what the supervisor itself said, by line."""

    code: int
    output: str
    said: list[str]


def launched(
    launcher: Callable[..., Finished],
    script: Path | str,
    command: str,
    *options: str,
    arguments: Sequence[str] = (),
    folder: Path,
    **more: object,
) -> Told:
    """Runs a script, a file or source code, under ``fleetpipe COMMAND`` with two processes."""
    file = script_file(script, folder)
    words = [command, "--nproc_per_node", "2", *options, str(file), *arguments]
    job = launcher(_COMMAND, None, args=[json.dumps(words)], cwd=folder, **more)
    code, output, errors = json.loads(job.logs[0].splitlines()[-1])
    beginnings = ("fleetpipe:", "    |", "  what")
    said = [line for line in errors.splitlines() if line.startswith(beginnings)]
    return Told(code, output, said)
