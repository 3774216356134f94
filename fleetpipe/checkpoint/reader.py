"""Reads a checkpoint: everything is checked before anything is filled.

The ranks share the checking, each a part of all files; then each reads its own bytes and no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetpipe.checkpoint import host, tensors
from fleetpipe.checkpoint.manifest import Manifest, Piece, Whole
from fleetpipe.checkpoint.parts import GROUPS, Held, Name
from fleetpipe.checkpoint.tensors import Layout, Stored
from fleetpipe.errors import CheckpointError

#: A value of JSON.
Json = Any


class Reader:
    """The files of one step, of which no byte is used that was not checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Reads the headers.

        Raises:
            CheckpointError: A file is missing, or its header or its size is not what was written.
        """
        self.folder = folder
        self.manifest = manifest
        self._layouts: dict[str, Layout] = {}
        for file, whole in manifest.files.items():
            path = folder / file
            with _told(path):
                _require_size(path, whole)
                if file.endswith(".safetensors"):
                    self._layouts[file] = _layout(path, whole)
        for name, entry in manifest.tensors.items():
            found = self._layouts[entry.file].tensors.get(name.name)
            if found is None or found.tensor != entry.tensor:
                raise _damaged(folder / entry.file, f"{name} is not what the manifest says")

    def text(self, name: str) -> Json:
        """Returns the contents of a JSON file of the folder, checked.

        Raises:
            CheckpointError: It is damaged.
        """
        path = self.folder / name
        with _told(path):
            data = path.read_bytes()
        if tensors.checksum([data]) != self.manifest.files[name].crc32:
            raise _damaged(path, "its checksum is of something else")
        return json.loads(data)

    def check(self, groups: Collection[str], share: int = 0, shares: int = 1) -> None:
        """Compares tensors with their checksums.

        Args:
            groups: The groups of files to look at.
            share: Which of ``shares`` is compared here: ranks do it together.
            shares: How many there are.

        Raises:
            CheckpointError: One is damaged; the message names it.
        """
        load = [0] * shares
        for name, piece in self._pieces(groups):
            taker = load.index(min(load))
            entry = self.manifest.tensors[name]
            load[taker] += entry.tensor.nbytes // len(entry.pieces)
            if taker == share:
                self._check(name, piece)

    def damaged(self) -> list[str]:
        """Returns the errors of all tensors that are damaged."""
        found = []
        for name, piece in self._pieces(GROUPS):
            try:
                self._check(name, piece)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def fill(self, wanted: Mapping[Name, Held]) -> None:
        """Gives tensors their saved values. They fit, and :meth:`check` has passed.

        Raises:
            CheckpointError: A file cannot be read any more.
        """
        for name, held in wanted.items():
            value, memory = host.empty_like(held)
            entry = self.manifest.tensors[name]
            with self._opened(entry.file) as file:
                tensors.read(file, self._stored(name), held.cut, memory)
            host.assign(held, value)

    def _pieces(self, groups: Collection[str]) -> Iterator[tuple[Name, Piece]]:
        for name, entry in self.manifest.tensors.items():
            if name.group in groups:
                yield from ((name, piece) for piece in entry.pieces)

    def _check(self, name: Name, piece: Piece) -> None:
        entry = self.manifest.tensors[name]
        with self._opened(entry.file) as file:
            found = tensors.stored_checksum(file, self._stored(name), piece.cut)
        if found != piece.crc32:
            where = "" if piece.cut is None else f", in {piece.cut.start} to {piece.cut.stop} "
            where += "" if piece.cut is None else f"of axis {piece.cut.axis}"
            raise _damaged(
                self.folder / entry.file, f"{name} has other bits than were saved{where}"
            )

    def _stored(self, name: Name) -> Stored:
        return self._layouts[self.manifest.tensors[name].file].tensors[name.name]

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self.folder / name
        with _told(path), path.open("rb", buffering=0) as file:
            yield file.fileno()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Makes one error of what the system says within it."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _require_size(path: Path, whole: Whole) -> None:
    size = os.stat(path).st_size
    if size != whole.size:
        raise _damaged(path, f"{size} bytes in the place of {whole.size}")


def _layout(path: Path, whole: Whole) -> Layout:
    layout = tensors.read_layout(path)
    if tensors.checksum([layout.header]) != whole.crc32:
        raise _damaged(path, "the checksum of its header is of something else")
    return layout


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is damaged",
        where=str(path),
        got=got,
        fix="restore another step; fleetpipe checkpoint verify says what else is damaged",
    )
