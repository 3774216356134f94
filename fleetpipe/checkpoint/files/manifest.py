"""``manifest.json``, the last file to be written: it makes a folder a checkpoint.

A file of tensors has its header and its tensors, without a gap: the checksums of the header and of
the written parts of each tensor cover every byte. All checksums are CRC-32.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL, Saved, TensorName
from fleetpipe.checkpoint.files.digests import hash_of
from fleetpipe.checkpoint.files.tensors import CODES, is_whole
from fleetpipe.errors import CheckpointError, is_file_name, is_shape
from fleetpipe.json_value import JsonValue, Source, parse, read_text
from fleetpipe.mesh.axes import COPIES
from fleetpipe.mesh.parts import Described, Region

MANIFEST = "manifest.json"
#: Of the format, not of the package. A reader refuses what is newer.
FORMAT, VERSION = "fleetpipe-checkpoint", 1
_CHECKSUM = "crc32"
_SOURCE = Source(
    f"{MANIFEST} is not the manifest of a checkpoint",
    CheckpointError,
    "restore another step; what has no manifest was never finished",
)
#: A value of JSON.
Json = Any


class Whole(NamedTuple):
    """The size of a file, and its checksum; for a file of tensors that of the header alone."""

    size: int
    crc32: int


class WrittenPart(NamedTuple):
    """A part of a tensor that one rank wrote, with its checksum."""

    cut: Region | None
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        file: The name of the file that has it.
        tensor: Its dtype and shape.
        pieces: The parts in which it was written.
        sha256: Of the model's tensors the digest; empty for others, and in older checkpoints.
    """

    file: str
    tensor: Described
    pieces: tuple[WrittenPart, ...]
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """All facts about a checkpoint except the values of its tensors.

    Attributes:
        step: The step after which it was saved.
        files: Every other file of the folder, by name.
        tensors: Every tensor, by group and name.
        order: The names of the model's parameters and buffers, in its order.
        optimizer: The type of the optimizer; None if none was saved.
        metrics: The figures that ``best`` compares.
        layout: Ranks along each axis of the job that wrote it; only the number of replicas matters.
        versions: Those of fleetpipe and Paddle; nothing depends on them.
        plain_order: As in :class:`Saved`.
        script: The name of the script that saved it and a digest of its arguments; empty if they
            are unknown, as in older checkpoints.
        allowed: What closed borders let pass, as ``BORDER:NAME``.
        adapters: As in :class:`Saved`.
    """

    step: int
    files: Mapping[str, Whole]
    tensors: Mapping[TensorName, Entry]
    order: tuple[str, ...]
    optimizer: str | None
    metrics: Mapping[str, float]
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    plain_order: tuple[str, ...] = ()
    script: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    adapters: str = ""

    @property
    def saved(self) -> Saved:
        """The description for a :class:`SavedPart`."""
        described = {name: entry.tensor for name, entry in self.tensors.items()}
        replicas = math.prod(self.layout.get(axis, 1) for axis in COPIES)
        order, plain_order = self.order, self.plain_order
        return Saved(described, order, self.optimizer, replicas, plain_order, self.adapters)

    @property
    def model_hash(self) -> str:
        """The hash of the model, the same for every layout; empty in older checkpoints."""
        digests = {n.name: entry.sha256 for n, entry in self.tensors.items() if n.group == MODEL}
        return hash_of(digests) if all(digests.values()) else ""

    def to_text(self) -> str:
        """Returns the text of the file, with its own checksum."""
        groups: dict[str, dict[str, Json]] = {group: {} for group in GROUPS}
        for name, entry in self.tensors.items():
            groups[name.group][name.name] = {
                "file": entry.file,
                "dtype": entry.tensor.dtype,
                "shape": entry.tensor.shape,
                "pieces": [[cut, crc] for cut, crc in entry.pieces],
                **({"sha256": entry.sha256} if entry.sha256 else {}),
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
            "plain_order": self.plain_order,
            **({"script": dict(self.script)} if self.script else {}),
            **({"allowed": self.allowed} if self.allowed else {}),
            **({"adapters": self.adapters} if self.adapters else {}),
        }
        return seal(contents)


def read(folder: Path) -> Manifest:
    """Reads the manifest of a step's folder.

    Raises:
        CheckpointError: The manifest is missing, damaged, of another program or of a newer version.
    """
    return read_text(folder / MANIFEST, _SOURCE, _parse_text)


def _parse_text(text: str) -> Manifest:
    parsed = parse(text, _SOURCE)
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if parsed[name].content != expected:
            raise parsed[name].refused(f"{expected!r}, which this fleetpipe reads")
    if text != _with_checksum(text.rpartition(f', "{_CHECKSUM}"')[0]):
        raise parsed[_CHECKSUM].refused("the checksum of what stands before it")
    return _parse_contents(parsed)


def seal(contents: Mapping[str, Json]) -> str:
    """Returns the text of a manifest that ends with the checksum of the text before it."""
    return _with_checksum(json.dumps(contents, sort_keys=True)[:-1])


def _with_checksum(body: str) -> str:
    return f'{body}, "{_CHECKSUM}": {zlib.crc32(body.encode())}}}\n'


def _parse_contents(content: JsonValue) -> Manifest:
    files = {
        name: whole.record(Whole, JsonValue.count)
        for name, whole in content["files"].fields().items()
    }
    if not all(map(is_file_name, files)):
        raise content["files"].refused("names of files of the folder")
    tensors = {
        TensorName(group, name): _entry(entry, files)
        for group, entries in content["tensors"].fields().items()
        for name, entry in entries.fields().items()
    }
    content["tensors"].require_names(GROUPS)
    order = content["order"].texts()
    if {name.name for name in tensors if name.group == MODEL} != set(order):
        raise content["order"].refused("the names of the model's tensors")
    optimizer = content["optimizer"]
    # Older checkpoints lack these.
    plain_order, script = content.get("plain_order"), content.get("script")
    allowed, adapters = content.get("allowed"), content.get("adapters")
    return Manifest(
        step=content["step"].count(),
        files=files,
        tensors=tensors,
        order=order,
        optimizer=None if optimizer.content is None else optimizer.text(),
        # A figure that nobody has computed yet is infinite.
        metrics={name: value.number() for name, value in content["metrics"].fields().items()},
        layout={name: value.count() for name, value in content["layout"].fields().items()},
        versions={name: value.text() for name, value in content["versions"].fields().items()},
        plain_order=() if plain_order is None else plain_order.texts(),
        script={} if script is None else {k: v.text() for k, v in script.fields().items()},
        allowed=() if allowed is None else allowed.texts(),
        adapters="" if adapters is None else adapters.text(),
    )


def _entry(content: JsonValue, files: Collection[str]) -> Entry:
    """Reads the entry of a tensor, and checks that its parts are the whole of it."""
    file, dtype, shape = content["file"].text(), content["dtype"].text(), content["shape"].counts()
    if file not in files:
        raise content["file"].refused("one of the files")
    if dtype not in CODES:
        raise content["dtype"].refused(", ".join(CODES))
    if not is_shape(shape):
        raise content["shape"].refused("the shape of a tensor")
    pieces = tuple(map(_piece, content["pieces"].items()))
    if not is_whole([piece.cut for piece in pieces], shape):
        raise content["pieces"].refused(f"the parts of a tensor of shape {list(shape)}")
    sha256 = content.get("sha256")  # which older checkpoints lack
    return Entry(file, Described(dtype, shape), pieces, "" if sha256 is None else sha256.text())


def _piece(content: JsonValue) -> WrittenPart:
    values = content.items()
    if len(values) != 2:
        raise content.refused("a cut and a checksum")
    cut = None
    if values[0].content is not None:
        numbers = values[0].counts()
        if len(numbers) != len(Region._fields):
            raise values[0].refused(f"a list of {', '.join(Region._fields)}")
        cut = Region(*numbers)
    return WrittenPart(cut, values[1].count())
