"""``manifest.json``: what makes a folder a checkpoint. It is written last, and says what is whole.

A file of tensors is its header and its tensors, without a gap: the checksums of the header and of
the parts in which each tensor was written cover every byte. All checksums are CRC-32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL, Saved, TensorName
from fleetpipe.checkpoint.files.tensors import CODES, Described, Region, is_whole
from fleetpipe.errors import CheckpointError

MANIFEST = "manifest.json"
#: Of the format, not of the package. A reader refuses what is newer.
FORMAT, VERSION = "fleetpipe-checkpoint", 1
_CHECKSUM = "crc32"
#: A value of JSON.
Json = Any


class Whole(NamedTuple):
    """A file: its bytes, and the checksum of all of them; of tensors, of the header alone."""

    size: int
    crc32: int


class WrittenPart(NamedTuple):
    """A part of a tensor that was written at once, with its checksum."""

    cut: Region | None
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        file: The file that it stands in.
        tensor: Its dtype and shape.
        pieces: The parts in which it was written.
    """

    file: str
    tensor: Described
    pieces: tuple[WrittenPart, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without its tensors.

    Attributes:
        step: The step after which it was saved.
        files: Every other file of the folder, by name.
        tensors: Every tensor, by group and name.
        order: The names of the model's parameters and buffers, in its order.
        optimizer: The type of the optimizer; None where none was saved.
        metrics: What ``best`` compares.
        layout: How the ranks were split that wrote it; only the number of replicas counts.
        versions: Of fleetpipe and Paddle; nothing depends on them.
    """

    step: int
    files: Mapping[str, Whole]
    tensors: Mapping[TensorName, Entry]
    order: tuple[str, ...]
    optimizer: str | None
    metrics: Mapping[str, float]
    layout: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def saved(self) -> Saved:
        """What a part is shown of it."""
        described = {name: entry.tensor for name, entry in self.tensors.items()}
        replicas = self.layout.get("dp", 1) * self.layout.get("sharding", 1)
        return Saved(described, self.order, self.optimizer, replicas)

    def to_text(self) -> str:
        """Returns the contents of the file, its own checksum among them."""
        groups: dict[str, dict[str, Json]] = {group: {} for group in GROUPS}
        for name, entry in self.tensors.items():
            groups[name.group][name.name] = {
                "file": entry.file,
                "dtype": entry.tensor.dtype,
                "shape": entry.tensor.shape,
                "pieces": [[cut, crc] for cut, crc in entry.pieces],
            }
        contents = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": {name: whole._asdict() for name, whole in self.files.items()},
            "tensors": {group: tensors for group, tensors in groups.items() if tensors},
            "order": self.order,
            "optimizer": self.optimizer,
            "metrics": dict(self.metrics),
            "layout": dict(self.layout),
            "versions": dict(self.versions),
        }
        return sealed(contents)


def read(folder: Path) -> Manifest:
    """Reads the manifest of a step's folder.

    Raises:
        CheckpointError: There is none, it is damaged, of another program or of a newer version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    try:
        contents = json.loads(text)
        if not isinstance(contents, dict) or contents.get("format") != FORMAT:
            raise ValueError("it is a file of another program")
        if contents.get("version") != VERSION:
            raise ValueError(
                f"it has version {contents.get('version')!r} of the format, "
                f"and this fleetpipe reads version {VERSION}"
            )
        if text != _with_checksum(text.rpartition(f', "{_CHECKSUM}"')[0]):
            raise ValueError("its checksum is of something else")
        return _parsed(contents)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}"[:200]) from error


def sealed(contents: Mapping[str, Json]) -> str:
    """Returns a manifest's text: its contents, and last the checksum of all that stands before."""
    return _with_checksum(json.dumps(contents, sort_keys=True)[:-1])


def _with_checksum(body: str) -> str:
    return f'{body}, "{_CHECKSUM}": {zlib.crc32(body.encode())}}}\n'


def _parsed(contents: Mapping[str, Json]) -> Manifest:
    files = {name: Whole(**whole) for name, whole in contents["files"].items()}
    if any("/" in name or name.startswith(".") for name in files):
        raise ValueError("a file outside of the folder")
    tensors = {}
    for group, entries in contents["tensors"].items():
        for name, entry in entries.items():
            if entry["file"] not in files or entry["dtype"] not in CODES or group not in GROUPS:
                raise ValueError(f"a tensor {name!r} of an unknown kind")
            pieces = tuple(
                WrittenPart(None if cut is None else Region(*cut), crc)
                for cut, crc in entry["pieces"]
            )
            tensor = Described(entry["dtype"], tuple(entry["shape"]))
            if not is_whole([piece.cut for piece in pieces], tensor.shape):
                raise ValueError(f"{name!r}, of which not every part was written")
            tensors[TensorName(group, name)] = Entry(entry["file"], tensor, pieces)
    if {name.name for name in tensors if name.group == MODEL} != set(contents["order"]):
        raise ValueError("an order of other names than the model's")
    found = Manifest(
        step=contents["step"],
        files=files,
        tensors=tensors,
        order=tuple(contents["order"]),
        optimizer=contents["optimizer"],
        metrics=contents["metrics"],
        layout=contents["layout"],
        versions=contents["versions"],
    )
    _require_kinds(found)
    return found


def _require_kinds(manifest: Manifest) -> None:
    """Refuses what no save writes, whoever computed the checksum of it."""
    entries = manifest.tensors.values()
    counts = [manifest.step, *manifest.layout.values()]
    counts += [number for whole in manifest.files.values() for number in whole]
    counts += [piece.crc32 for entry in entries for piece in entry.pieces]
    for name, entry in manifest.tensors.items():
        if not all(map(_is_count, entry.tensor.shape)):
            raise ValueError(f"{name.name!r}, of a shape that has no sizes")
    if not all(map(_is_count, counts)):
        raise ValueError("a number that is no count")
    # A figure that nobody has computed yet is infinite.
    if not all(
        type(value) is float or (type(value) is int and abs(value) < 1 << 63)
        for value in manifest.metrics.values()
    ):
        raise ValueError("a metric that is no number")
    if not all(isinstance(text, str) for text in (*manifest.order, *manifest.versions.values())):
        raise ValueError("a name that is no text")
    if not isinstance(manifest.optimizer, (str, type(None))):
        raise ValueError("an optimizer that is no text")


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _unreadable(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not the manifest of a checkpoint",
        where=str(path),
        got=got,
        fix="restore another step; what has no manifest was never finished",
    )
