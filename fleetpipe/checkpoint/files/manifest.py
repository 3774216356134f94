"""Describes a checkpoint in ``manifest.json``, and reads the folder of a step: ``StepReader``.

The manifest is written last: a folder without one is no checkpoint. A file of tensors has a header
and its tensors, without a gap: the checksums of the header and of the written parts of each tensor
cover every byte, and each rank compares a share of the files. The hash of a model is made of the
digests of all its tensors. Nothing here imports Paddle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL, Saved, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.tensors import CODES, Layout, Stored, damage, make_up_tensor
from fleetpipe.errors import CheckpointError, is_file_name, is_shape
from fleetpipe.json_value import JsonValue, Source, parse, read_text
from fleetpipe.mesh.axes import COPIES
from fleetpipe.mesh.parts import Described, Region

#: The number of hex digits of a hash that tables show.
SHORT = 12

MANIFEST = "manifest.json"
#: The version is that of the format, not of the package. A reader refuses newer versions.
FORMAT, VERSION = "fleetpipe-checkpoint", 1
_CHECKSUM = "crc32"
_SOURCE = Source(
    f"{MANIFEST} is not the manifest of a checkpoint",
    CheckpointError,
    "restore another step; what has no manifest was never finished",
)
#: A value of JSON.
Json = Any


def tensor_digest(tensor: Described, parts: Iterable[Any]) -> str:
    """Returns the digest of a tensor, 64 hex digits.

    Args:
        tensor: The tensor's dtype and shape.
        parts: All bytes of the tensor, in one or more blocks.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_lines(digests: Mapping[str, str]) -> Iterator[str]:
    """Returns the lines of which the hash of a model is made, without line ends.

    Args:
        digests: The digest of each tensor by name.
    """
    return (f"{digest}  {name}" for name, digest in sorted(digests.items()))


def hash_of(digests: Mapping[str, str]) -> str:
    """Returns the hash of a model, 64 hex digits, from the digest of each tensor by name."""
    # A name from a damaged file may have half of a surrogate pair.
    text = "".join(f"{line}\n" for line in hash_lines(digests))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class FileSummary(NamedTuple):
    """What the manifest says of another file.

    Attributes:
        size: The number of bytes of the file.
        crc32: The checksum of the file; for a file of tensors the checksum of its header.
    """

    size: int
    crc32: int


class WrittenPart(NamedTuple):
    """A part of a tensor that one rank wrote.

    Attributes:
        cut: The region of the part; None for the full tensor.
        crc32: The checksum of the part's bytes.
    """

    cut: Region | None
    crc32: int


@dataclass(frozen=True)
class Entry:
    """What the manifest says of a tensor.

    Attributes:
        file: The name of the file that has the tensor.
        tensor: The dtype and shape of the full tensor.
        pieces: The parts in which the tensor was written, in order.
        sha256: The digest of a tensor of the model; empty for others, and in older checkpoints.
    """

    file: str
    tensor: Described
    pieces: tuple[WrittenPart, ...]
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """All facts about a checkpoint except the values of its tensors.

    Attributes:
        step: The step after which the checkpoint was saved.
        files: The size and checksum of every other file of the folder, by name.
        tensors: Every tensor, by group and name.
        order: The names of the model's parameters and buffers, in the order of the model.
        optimizer: The type of the optimizer; None if none was saved.
        metrics: The numbers, by name, of which ``best`` compares one.
        layout: Ranks along each axis of the job that saved; only the number of replicas matters.
        versions: The versions of fleetpipe and Paddle; nothing depends on them.
        plain_order: For each name in ``order`` the tensor's name in the model without the pipeline,
            as in :class:`Saved`.
        script: The name of the script that saved and a digest of its arguments; empty if they are
            unknown, such as in older checkpoints.
        allowed: What the run allowed by ``fleetpipe_configs["allow"]``, each in the form
            ``KIND:NAME``.
        adapters: The description of LoRA adapters; empty without any.
    """

    step: int
    files: Mapping[str, FileSummary]
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
        """The description of the tensors that a :class:`SavedPart` needs to restore them."""
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
        """Returns the text of ``manifest.json``, with its own checksum at the end."""
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


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a step's folder.

    Raises:
        CheckpointError: The manifest is missing, damaged, of another program or of a newer version.
    """
    return read_text(folder / MANIFEST, _SOURCE, _parse_text)


def _parse_text(text: str) -> Manifest:
    """Checks format, version and checksum of the text of a manifest, and parses it."""
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
    """Returns the text of a JSON object that ends with the checksum of what stands before it.

    ``body`` is the text of the object without the last brace.
    """
    return f'{body}, "{_CHECKSUM}": {zlib.crc32(body.encode())}}}\n'


def _parse_contents(content: JsonValue) -> Manifest:
    """Makes a manifest of a parsed JSON object.

    Raises:
        CheckpointError: The object is not that of a manifest.
    """
    files = {
        name: whole.record(FileSummary, JsonValue.count)
        for name, whole in content["files"].fields().items()
    }
    if not all(map(is_file_name, files)):
        raise content["files"].refused("names of files of the folder")
    tensors = {
        TensorName(group, name): _parse_entry(entry, files)
        for group, entries in content["tensors"].fields().items()
        for name, entry in entries.fields().items()
    }
    content["tensors"].require_names(GROUPS)
    order = content["order"].texts()
    if {name.name for name in tensors if name.group == MODEL} != set(order):
        raise content["order"].refused("the names of the model's tensors")
    optimizer = content["optimizer"]
    # Older checkpoints do not have these.
    plain_order, script = content.get("plain_order"), content.get("script")
    allowed, adapters = content.get("allowed"), content.get("adapters")
    return Manifest(
        step=content["step"].count(),
        files=files,
        tensors=tensors,
        order=order,
        optimizer=None if optimizer.content is None else optimizer.text(),
        # A metric may be infinite, before it was computed.
        metrics={name: value.number() for name, value in content["metrics"].fields().items()},
        layout={name: value.count() for name, value in content["layout"].fields().items()},
        versions={name: value.text() for name, value in content["versions"].fields().items()},
        plain_order=() if plain_order is None else plain_order.texts(),
        script={} if script is None else {k: v.text() for k, v in script.fields().items()},
        allowed=() if allowed is None else allowed.texts(),
        adapters="" if adapters is None else adapters.text(),
    )


def _parse_entry(content: JsonValue, files: Collection[str]) -> Entry:
    """Makes a tensor's entry of parsed JSON; checks that the entry's parts make up the tensor.

    ``files`` are the names of the files that an entry may name.
    """
    file, dtype, shape = content["file"].text(), content["dtype"].text(), content["shape"].counts()
    if file not in files:
        raise content["file"].refused("one of the files")
    if dtype not in CODES:
        raise content["dtype"].refused(", ".join(CODES))
    if not is_shape(shape):
        raise content["shape"].refused("the shape of a tensor")
    pieces = tuple(map(_parse_written_part, content["pieces"].items()))
    if not make_up_tensor([piece.cut for piece in pieces], shape):
        raise content["pieces"].refused(f"the parts of a tensor of shape {list(shape)}")
    sha256 = content.get("sha256")  # older checkpoints have none
    return Entry(file, Described(dtype, shape), pieces, "" if sha256 is None else sha256.text())


def _parse_written_part(content: JsonValue) -> WrittenPart:
    """Makes a tensor's part of its parsed JSON, a list of the region and the checksum."""
    items = content.items()
    if len(items) != 2:
        raise content.refused("a cut and a checksum")
    region, checksum = items
    cut = None
    if region.content is not None:
        numbers = region.counts()
        if len(numbers) != len(Region._fields):
            raise region.refused(f"a list of {', '.join(Region._fields)}")
        cut = Region(*numbers)
    return WrittenPart(cut, checksum.count())


class SavedStep(Protocol):
    """A checkpoint to restore from: a :class:`StepReader`, or the files of another program."""

    @property
    def manifest(self) -> Manifest:
        """The manifest, which describes everything in the checkpoint but the tensors' values."""

    def text(self, name: str) -> Json:
        """Returns the parsed contents of a JSON file."""

    def check_texts(self) -> None:
        """Checks the files without tensors; raises ``CheckpointError`` if one is damaged."""

    def check(self, groups: Collection[str], share: int, shares: int) -> None:
        """Checks one of ``shares`` about equal shares of the tensors in ``groups``."""

    def opened(
        self,
    ) -> AbstractContextManager[Callable[[TensorName, Region | None, memoryview], None]]:
        """Opens the files, and yields a function that reads, as :meth:`StepReader.opened` does."""


class StepReader:
    """Reads the files in the folder of one step, and compares their bytes with checksums.

    Attributes:
        folder: The folder of the step.
        manifest: The manifest in it.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the manifest, and compares sizes and headers of all files with it.

        Raises:
            CheckpointError: The manifest is missing, damaged or of a newer version; a file is
                missing, or its header or its size is wrong.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._layouts: dict[str, Layout] = {}
        for file, summary in self.manifest.files.items():
            path = folder / file
            with _as_damage(path):
                size = os.stat(path).st_size
                if size != summary.size:
                    raise damage(path, f"{size} bytes in the place of {summary.size}")
                if file.endswith(".safetensors"):
                    layout = self._layouts[file] = tensors.read_layout(path)
                    if tensors.checksum([layout.header]) != summary.crc32:
                        raise damage(path, "the checksum of its header is of something else")
        for name, entry in self.manifest.tensors.items():
            tensors_in_file: Mapping[str, Stored] = {}
            if entry.file in self._layouts:
                tensors_in_file = self._layouts[entry.file].tensors
            stored = tensors_in_file.get(name.name)
            if stored is None or stored.tensor != entry.tensor:
                raise damage(folder / entry.file, f"{name} is not what the manifest says")

    def text(self, name: str) -> Json:
        """Checks the checksum of a JSON file of the folder, and returns its parsed contents.

        Raises:
            CheckpointError: The file is damaged.
        """
        path = self.folder / name
        with _as_damage(path):
            data = path.read_bytes()
        if tensors.checksum([data]) != self.manifest.files[name].crc32:
            raise damage(path, "its checksum is of something else")
        return json.loads(data)

    def check_texts(self) -> None:
        """Compares the files without tensors with their checksums.

        Raises:
            CheckpointError: A file is damaged.
        """
        for name in self.manifest.files.keys() - self._layouts.keys():
            self.text(name)

    def check(self, groups: Collection[str], share: int = 0, shares: int = 1) -> None:
        """Compares a share of the tensors with their checksums.

        Args:
            groups: The groups of tensors to check.
            share: The number of the share that this rank checks, from 0.
            shares: Number of shares, one for each rank, of about as many bytes each.

        Raises:
            CheckpointError: A tensor is damaged; the message names it.
        """
        loads = [0] * shares
        chosen = []
        for name, piece in self._pieces_of(groups):
            least = loads.index(min(loads))
            entry = self.manifest.tensors[name]
            loads[least] += entry.tensor.nbytes // len(entry.pieces)
            if least == share:
                chosen.append((name, piece))
        for error in self._compare(chosen):
            raise error

    def find_damage(self) -> list[CheckpointError]:
        """Returns an error for each damaged part of any tensor."""
        return list(self._compare(self._pieces_of(GROUPS)))

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Opens the files of tensors while this context is open.

        Yields:
            ``read(name, cut, memory)``, which fills memory with the part of a tensor in a region,
            or with the full tensor for None. It raises ``CheckpointError`` if a file cannot be read
            any more.
        """
        with self._open_files() as opened:

            def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
                file, stored = opened(name)
                with _as_damage(self._path(name)):
                    tensors.read(file, stored, cut, memory)

            yield read

    def _pieces_of(self, groups: Collection[str]) -> Iterator[tuple[TensorName, WrittenPart]]:
        """Yields each written part of the tensors in some groups, after the tensor's name."""
        for name, entry in self.manifest.tensors.items():
            if name.group in groups:
                yield from ((name, piece) for piece in entry.pieces)

    def _compare(
        self, pieces: Iterable[tuple[TensorName, WrittenPart]]
    ) -> Iterator[CheckpointError]:
        """Yields an error for each part of a tensor whose checksum is wrong."""
        with self._open_files() as opened:
            for name, piece in pieces:
                file, stored = opened(name)
                with _as_damage(self._path(name)):
                    checksum = tensors.checksum(tensors.blocks(file, stored, piece.cut))
                if checksum != piece.crc32:
                    cut = piece.cut
                    region = f", in {cut.start} to {cut.stop} of axis {cut.axis}" if cut else ""
                    yield damage(self._path(name), f"{name} has other bits than were saved{region}")

    def _path(self, name: TensorName) -> Path:
        """Returns the path of the file that has a tensor."""
        return self.folder / self.manifest.tensors[name].file

    @contextmanager
    def _open_files(self) -> Iterator[Callable[[TensorName], tuple[FileIO, Stored]]]:
        """Opens each file when a tensor of it is first needed, and closes all at the end.

        Yields:
            A function that returns the open file of a tensor, and the tensor's offset in it.
        """
        with ExitStack() as files:

            @cache
            def open_file(path: Path) -> FileIO:
                with _as_damage(path):
                    return files.enter_context(path.open("rb", buffering=0))

            yield lambda name: (
                open_file(self._path(name)),
                self._layouts[self.manifest.tensors[name].file].tensors[name.name],
            )


@contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """In this context, turns an ``OSError`` into the error that the file at ``path`` is damaged."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise damage(path, f"{type(error).__name__}: {error}") from error
