"""What a run leaves beside its trail: files, by what is in them, and the lines that it prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from fleetpipe.checkpoint.files.manifest import MANIFEST
from fleetpipe.checkpoint.hash_command import digests_in
from fleetpipe.compare.recorder import summaries
from fleetpipe.compare.trail import Summary
from fleetpipe.errors import FleetPipeError
from fleetpipe.paddle_api import paddle

#: A number with a decimal point: others count ranks and rows, and name the layout.
_FLOAT = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+|\bnan\b|\binf\b")
_NUMBER = re.compile(r"\d+")
_TEXTS = {".csv", ".json", ".jsonl", ".log", ".md", ".txt", ".tsv", ".yaml", ".yml"}
#: Of numbers in texts, which are rounded as they are written.
_OF_TEXT = 1e-4

Contents = Mapping[str, Mapping[str, Summary]]


def files_in(folder: Path, before: Mapping[Path, tuple[int, int]]) -> Contents:
    """Returns what is in the files that a run has made or changed, by relative path.

    A checkpoint of fleetpipe's counts by its tensors, since its files are those of the ranks.

    Args:
        folder: The working directory of the run.
        before: The stamp of each file before the run, as :func:`stamps` returns them.
    """
    steps = [path.parent for path in sorted(folder.rglob(MANIFEST))]
    contents: dict[str, Mapping[str, Summary]] = {}
    for step in steps:
        contents[str(step.relative_to(folder))] = _tensors_of(step)
    for path, stamp in stamps(folder).items():
        inside = any(step in path.parents for step in steps)
        if before.get(path) != stamp and not inside and not path.name.startswith("."):
            contents[str(path.relative_to(folder))] = _content(path)
    return contents


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns time and size of each file below a folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            status = path.stat()
            files[path] = status.st_mtime_ns, status.st_size
    return files


def _tensors_of(step: Path) -> Mapping[str, Summary]:
    try:
        return {name: Summary("tensor", digest) for name, digest in digests_in(step).items()}
    except FleetPipeError as error:
        return {"": Summary.of_plain(str(error))}


def _content(path: Path) -> Mapping[str, Summary]:
    if path.suffix in _TEXTS:
        return dict(enumerate_lines(path.read_text("utf-8", errors="replace").splitlines()))
    with suppress(Exception):  # of any kind: then its bytes are compared
        if path.suffix in {".pdparams", ".pdopt", ".pdstates"}:
            return summaries(paddle.load(str(path)))
        if path.suffix in {".npy", ".npz"}:
            loaded = np.load(path)
            return summaries(dict(loaded) if path.suffix == ".npz" else loaded)
    return {"": Summary.of_bytes("bytes", path.read_bytes())}


def enumerate_lines(lines: Iterable[str]) -> Iterator[tuple[str, Summary]]:
    """Yields the lines of a text by what stands around their numbers, and how often it stood."""
    seen: Counter[str] = Counter()
    for line in lines:
        around = _NUMBER.sub("#", _FLOAT.sub("#.#", line.strip()))
        numbers = tuple(map(float, _FLOAT.findall(line)))
        seen[around] += 1
        yield f"{around} ({seen[around]})", Summary("text", repr(numbers), numbers)


def texts_apart(one: Summary, other: Summary) -> bool:
    """Whether the numbers of two lines differ by more than what is rounded as it is written."""
    return one.distance(other) > _OF_TEXT
