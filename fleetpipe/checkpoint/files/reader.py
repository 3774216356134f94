"""Reads the files of a checkpoint, and compares them with the checksums of its manifest.

Each rank compares a part of the files. It needs no Paddle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from fleetpipe.checkpoint.contents.parts import GROUPS, TensorName
from fleetpipe.checkpoint.files import manifest, tensors
from fleetpipe.checkpoint.files.manifest import Manifest, Whole, WrittenPart
from fleetpipe.checkpoint.files.tensors import Layout, Stored, damage
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.parts import Region

#: A value of JSON.
Json = Any


class SavedStep(Protocol):
    """A source to restore from: a :class:`StepReader`, or the files of another program."""

    @property
    def manifest(self) -> Manifest:
        """The manifest, which describes all but the tensors' values."""

    def text(self, name: str) -> Json:
        """Returns the parsed contents of a JSON file."""

    def check_texts(self) -> None:
        """Checks the files that hold no tensors."""

    def check(self, groups: Collection[str], share: int, shares: int) -> None:
        """Checks one of ``shares`` shares of the tensors."""

    def opened(
        self,
    ) -> AbstractContextManager[Callable[[TensorName, Region | None, memoryview], None]]:
        """Opens the files, and yields a function that reads a part of a tensor into memory."""


class StepReader:
    """The files of one step, whose bytes are checked before they are used."""

    def __init__(self, folder: Path) -> None:
        """Reads the manifest and the headers.

        Raises:
            CheckpointError: The manifest is missing, damaged or of a newer version; a file is
                missing, or its header or its size is wrong.
        """
        self.folder = folder
        self.manifest = manifest.read(folder)
        self._layouts: dict[str, Layout] = {}
        for file, whole in self.manifest.files.items():
            path = folder / file
            with _damage_named(path):
                _require_size(path, whole)
                if file.endswith(".safetensors"):
                    self._layouts[file] = _layout(path, whole)
        for name, entry in self.manifest.tensors.items():
            layout = self._layouts.get(entry.file)
            stored = None if layout is None else layout.tensors.get(name.name)
            if stored is None or stored.tensor != entry.tensor:
                raise damage(folder / entry.file, f"{name} is not what the manifest says")

    def text(self, name: str) -> Json:
        """Returns the parsed contents of a JSON file of the folder, after a check of its checksum.

        Raises:
            CheckpointError: The file is damaged.
        """
        path = self.folder / name
        with _damage_named(path):
            data = path.read_bytes()
        if tensors.checksum([data]) != self.manifest.files[name].crc32:
            raise damage(path, "its checksum is of something else")
        return json.loads(data)

    def check_texts(self) -> None:
        """Compares the files that hold no tensors with their checksums.

        Raises:
            CheckpointError: A file is damaged.
        """
        for name in self.manifest.files.keys() - self._layouts.keys():
            self.text(name)

    def check(self, groups: Collection[str], share: int = 0, shares: int = 1) -> None:
        """Compares tensors with their checksums.

        Args:
            groups: The groups of files to check.
            share: The number of the share that this rank checks.
            shares: Number of shares, one for each rank.

        Raises:
            CheckpointError: A tensor is damaged; the message names it.
        """
        load = [0] * shares
        chosen = []
        for name, piece in self._pieces(groups):
            taker = load.index(min(load))
            entry = self.manifest.tensors[name]
            load[taker] += entry.tensor.nbytes // len(entry.pieces)
            if taker == share:
                chosen.append((name, piece))
        for error in self._compare(chosen):
            raise error

    def find_damage(self) -> list[CheckpointError]:
        """Returns an error for each part of a tensor that is damaged."""
        return list(self._compare(self._pieces(GROUPS)))

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Yields ``read(name, part, memory)``, which reads a part of a tensor; None is all of it.

        That raises ``CheckpointError`` if a file cannot be read any more.
        """
        with self._open_files() as opened:

            def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
                file, stored = opened(name)
                with _damage_named(self._path(name)):
                    tensors.read(file, stored, cut, memory)

            yield read

    def _pieces(self, groups: Collection[str]) -> Iterator[tuple[TensorName, WrittenPart]]:
        for name, entry in self.manifest.tensors.items():
            if name.group in groups:
                yield from ((name, piece) for piece in entry.pieces)

    def _compare(
        self, pieces: Iterable[tuple[TensorName, WrittenPart]]
    ) -> Iterator[CheckpointError]:
        """Yields an error for each piece whose checksum is wrong."""
        with self._open_files() as opened:
            for name, piece in pieces:
                file, stored = opened(name)
                with _damage_named(self._path(name)):
                    checksum = tensors.stored_checksum(file, stored, piece.cut)
                if checksum != piece.crc32:
                    cut = piece.cut
                    place = f", in {cut.start} to {cut.stop} of axis {cut.axis}" if cut else ""
                    yield damage(self._path(name), f"{name} has other bits than were saved{place}")

    def _path(self, name: TensorName) -> Path:
        return self.folder / self.manifest.tensors[name].file

    @contextmanager
    def _open_files(self) -> Iterator[Callable[[TensorName], tuple[FileIO, Stored]]]:
        """Yields a function that returns the open file of a tensor, and its offset there."""
        with ExitStack() as files:

            @cache
            def open_file(path: Path) -> FileIO:
                with _damage_named(path):
                    return files.enter_context(path.open("rb", buffering=0))

            yield lambda name: (
                open_file(self._path(name)),
                self._layouts[self.manifest.tensors[name].file].tensors[name.name],
            )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turns errors of the system into one that says that the file is damaged."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise damage(path, f"{type(error).__name__}: {error}") from error


def _require_size(path: Path, whole: Whole) -> None:
    size = os.stat(path).st_size
    if size != whole.size:
        raise damage(path, f"{size} bytes in the place of {whole.size}")


def _layout(path: Path, whole: Whole) -> Layout:
    layout = tensors.read_layout(path)
    if tensors.checksum([layout.header]) != whole.crc32:
        raise damage(path, "the checksum of its header is of something else")
    return layout
