"""Names the files in the folder of a run, and reads and writes files of JSON lines.

A line may be torn: incomplete, as its process was killed while it wrote the line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe import atomic_file

#: A row of figures for each batch and evaluation.
METRICS = "metrics.jsonl"
#: Facts about the run: layout, stages, schedule, configuration, versions.
ABOUT = "run.json"
#: When each attempt of the run began, and how it ended.
ATTEMPTS = "lives.jsonl"
#: A line for each time that a rank became slow.
SLOW = "slow.jsonl"
#: A trace of a few steps, in the folder itself or in a folder within it.
TRACE = "trace.json"


class Lines(NamedTuple):
    """The contents of a file of JSON lines.

    Attributes:
        values: The objects, in order.
        torn: Number of invalid lines, such as the last one of a process that was killed.
    """

    values: list[dict[str, Any]]
    torn: int


def read_lines(path: Path) -> Lines:
    """Reads a file of JSON lines; a missing file has no lines.

    Raises:
        OSError: The file cannot be read.
    """
    values: list[dict[str, Any]] = []
    torn = 0
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            if isinstance(value, dict):
                values.append(value)
            elif line.strip():
                torn += 1
    return Lines(values, torn)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends an object to a file of JSON lines, on a new line even after a torn one.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")


def replace_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Replaces a file of JSON lines at once: if the process is killed, the old file stays.

    Raises:
        OSError: The file cannot be written.
    """
    atomic_file.replace_text(path, "".join(json.dumps(value) + "\n" for value in values))
