"""Plans, writes and reads files of tensors in the safetensors format, of which each rank has parts.

Start with ``plan_files``, which says what is in each file and which rank writes which part. A part
is a region of a full tensor; ``cut`` is that region, or None for the full tensor. The files depend
only on the full tensors: any layout of ranks writes the same bytes. Several ranks write and read
one file in parts, which the functions of the safetensors library cannot.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from fleetpipe.checkpoint.contents.parts import GROUPS, MASTER_WEIGHTS, OPTIMIZER, TensorName
from fleetpipe.errors import CheckpointError, is_shape
from fleetpipe.mesh.parts import Described, LocalTensor, Region

#: The format's code of each dtype, by Paddle's name.
CODES: Mapping[str, str] = {
    "float64": "F64",
    "int64": "I64",
    "complex64": "C64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
#: Paddle's name of each dtype, by the format's code.
_DTYPES = {code: name for name, code in CODES.items()}
#: A file begins with the length of its header, a number of so many bytes.
_LENGTH_BYTES = 8
#: The most bytes of a header, as in the safetensors library.
_LARGEST_HEADER = 100_000_000
#: Bytes that are read at a time for a checksum or a digest.
_BLOCK = 1 << 20

#: The bytes of tensors that a file has at most, unless a single tensor has more.
FILE_BYTES = 4 << 30

#: Splits a name into texts and numbers, for :func:`_natural_key`.
_DIGITS = re.compile(r"(\d+)")


class ByteRun(NamedTuple):
    """Consecutive bytes of a part of a tensor that are consecutive in the full tensor too.

    Attributes:
        tensor_offset: The offset of the first byte in the full tensor.
        part_offset: The offset of the first byte in the part.
        nbytes: The number of bytes.
    """

    tensor_offset: int
    part_offset: int
    nbytes: int


def byte_runs(shape: tuple[int, ...], itemsize: int, cut: Region | None) -> Iterator[ByteRun]:
    """Yields the runs of consecutive bytes that make up a part of a tensor, in order.

    Args:
        shape: The shape of the full tensor.
        itemsize: Bytes of one element.
        cut: The region of the part; None for the full tensor.
    """
    if cut is None:
        yield ByteRun(0, 0, math.prod(shape) * itemsize)
        return
    index_bytes = math.prod(shape[cut.axis + 1 :]) * itemsize  # of one index along the axis
    run_bytes = (cut.stop - cut.start) * index_bytes
    for row in range(math.prod(shape[: cut.axis])):
        yield ByteRun((row * cut.size + cut.start) * index_bytes, row * run_bytes, run_bytes)


def make_up_tensor(cuts: Sequence[Region | None], shape: tuple[int, ...]) -> bool:
    """Returns whether parts, in this order, make up a tensor without gap or overlap.

    Args:
        cuts: The region of each part; None for the full tensor.
        shape: The shape of the full tensor.
    """
    if list(cuts) == [None]:
        return True
    end, axes = 0, set()
    for cut in cuts:
        if cut is None or not 0 <= cut.axis < len(shape) or cut.size != shape[cut.axis]:
            return False
        if cut.start != end or cut.stop < end:
            return False
        end = cut.stop
        axes.add(cut.axis)
    return len(axes) == 1 and end == shape[axes.pop()]


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        tensor: The tensor's dtype and shape.
        begin: The offset of its first byte in the file.
    """

    tensor: Described
    begin: int


class Layout(NamedTuple):
    """The header of a file, and where its tensors are.

    Attributes:
        header: The bytes of the file up to the first tensor.
        tensors: The tensors with their offsets, by name.
        size: The number of bytes of the file.
    """

    header: bytes
    tensors: Mapping[str, Stored]
    size: int


def layout_of(tensors: Mapping[str, Described], made_for: str = "pd") -> Layout:
    """Returns the layout of a file for ``tensors``, in which larger dtypes come first.

    Args:
        tensors: The dtype and shape of each tensor, by name.
        made_for: The code of a framework for the header's metadata, which some readers need:
            ``"pd"`` is Paddle.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": made_for}}
    begins, end = {}, 0
    for name, tensor in ordered:
        begins[name], end = end, end + tensor.nbytes
        code = CODES[tensor.dtype]
        entries[name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # so that the first tensor is aligned
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    stored = {name: Stored(tensor, len(header) + begins[name]) for name, tensor in ordered}
    return Layout(header, stored, len(header) + end)


def read_layout(path: Path) -> Layout:
    """Reads the header of a file, and checks that its tensors fill the file exactly.

    Raises:
        CheckpointError: It is no safetensors file, it ends early, or its tensors do not fill it.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        count = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= count <= min(size - _LENGTH_BYTES, _LARGEST_HEADER):
            raise damage(path, f"a header of {count} bytes in a file of {size}")
        text = file.read(count)
    try:
        tensors = _parse_entries(text, _LENGTH_BYTES + count)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damage(path, str(error)[:200]) from error
    end = _LENGTH_BYTES + count
    by_offset = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].tensor.nbytes))
    for name, (tensor, begin) in by_offset:
        if begin != end:
            raise damage(path, f"{name!r} begins at {begin}, and the one before ends at {end}")
        end += tensor.nbytes
    if end != size:
        raise damage(path, f"tensors up to {end} in a file of {size} bytes")
    return Layout(count.to_bytes(_LENGTH_BYTES, "little") + text, tensors, size)


def _parse_entries(text: bytes, start: int) -> dict[str, Stored]:
    """Parses the JSON text of a header.

    Args:
        text: The text.
        start: The offset in the file at which the first tensor begins.

    Returns:
        The tensors by name.

    Raises:
        ValueError: The text is no such JSON, or an entry of it is invalid.
    """

    def refuse_repeated_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """Returns a dict of a JSON object's pairs; raises a ValueError for a repeated name."""
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise ValueError("a name that stands there twice")
        return entries

    entries = json.loads(text, object_pairs_hook=refuse_repeated_names)
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        name.encode()  # raises an error for half of a surrogate pair
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r} has the dtype {entry['dtype']!r}, which Paddle has not")
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        are_offsets = all(type(number) is int and number >= 0 for number in (begin, end))
        if not are_offsets or not is_shape(shape):
            raise ValueError(f"{name!r} has sizes that are no numbers of elements or bytes")
        tensor = Described(_DTYPES[entry["dtype"]], shape)
        if end - begin != tensor.nbytes:
            raise ValueError(f"{name!r}, {tensor}, has {end - begin} bytes")
        tensors[name] = Stored(tensor, start + begin)
    return tensors


def damage(path: Path, got: str) -> CheckpointError:
    """Returns the error for a damaged file; ``got`` says what is wrong with it."""
    return CheckpointError(
        f"{path.name} is damaged",
        where=str(path),
        got=got,
        fix="take another step, or copy this one again; fleetpipe checkpoint verify checks a run",
    )


def write(file: FileIO, stored: Stored, cut: Region | None, values: memoryview) -> None:
    """Writes a part of a tensor at its offsets in an open file.

    Args:
        file: The file, open for writing without a buffer.
        stored: The full tensor in the file.
        cut: The region of the part; None for the full tensor.
        values: The bytes of the part.
    """
    tensor, begin = stored
    for run in byte_runs(tensor.shape, tensor.itemsize, cut):
        block = values[run.part_offset : run.part_offset + run.nbytes]
        write_at(file, begin + run.tensor_offset, block)


def write_at(file: FileIO, offset: int, values: memoryview | bytes) -> None:
    """Writes all bytes of ``values`` from an offset on, by several system calls if necessary."""
    file.seek(offset)
    rest = memoryview(values)
    while rest:
        rest = rest[file.write(rest) :]


def read(file: FileIO, stored: Stored, cut: Region | None, memory: memoryview) -> None:
    """Reads a part of a tensor from an open file.

    Args:
        file: The file, open for reading without a buffer.
        stored: The full tensor in the file.
        cut: The region of the part; None for the full tensor.
        memory: Memory of the part's size, which is filled.

    Raises:
        EOFError: The file ends too early.
    """
    tensor, begin = stored
    for run in byte_runs(tensor.shape, tensor.itemsize, cut):
        block = memory[run.part_offset : run.part_offset + run.nbytes]
        _read_at(file, begin + run.tensor_offset, block)


def _read_at(file: FileIO, offset: int, memory: memoryview) -> None:
    """Fills ``memory`` with the bytes of a file from ``offset`` on.

    Raises:
        EOFError: The file ends before the memory is full.
    """
    file.seek(offset)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise EOFError
        memory = memory[count:]


def checksum(values: Iterable[memoryview | bytes]) -> int:
    """Returns the CRC-32 of blocks of bytes, one after another."""
    value = 0
    for block in values:
        value = zlib.crc32(block, value)
    return value


def blocks(file: FileIO, stored: Stored, cut: Region | None = None) -> Iterator[memoryview]:
    """Yields the bytes of a part of a tensor in an open file, block by block.

    Each block is overwritten by the next one. The arguments are those of :func:`read`.

    Raises:
        EOFError: The file ends too early.
    """
    tensor, begin = stored
    buffer = memoryview(bytearray(_BLOCK))
    for run in byte_runs(tensor.shape, tensor.itemsize, cut):
        for start in range(0, run.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, run.nbytes - start)]
            _read_at(file, begin + run.tensor_offset + start, block)
            yield block


class Share(NamedTuple):
    """A part of a tensor, and the rank that writes it.

    Attributes:
        cut: The region of the part; None for the full tensor.
        writer: The number of the rank in the job.
    """

    cut: Region | None
    writer: int


class FilePlan(NamedTuple):
    """The files of tensors of a checkpoint, and the writer of each part of a tensor.

    Attributes:
        files: The layout of each file, by the file's name.
        groups: The names of the files of each group of tensors, by the group's name: one of
            ``GROUPS``, such as "model" or "optimizer".
        shares: The parts of each tensor, by the names of the file and of the tensor. They are in
            the order in which they follow each other along the axis that ranks have cut; a tensor
            that no rank has cut has one part.
    """

    files: Mapping[str, Layout]
    groups: Mapping[str, tuple[str, ...]]
    shares: Mapping[str, Mapping[str, tuple[Share, ...]]]

    def header_writer(self, file: str) -> int:
        """Returns the rank that writes the header and the first part of a file."""
        first_part, *_ = next(iter(self.shares[file].values()))
        return first_part.writer

    def parts_of(self, rank: int) -> list[tuple[TensorName, str, Region | None]]:
        """Returns the parts that a rank writes, in the order of the files.

        Each item is the name of the tensor, the name of the file, and the region of the part.
        """
        return [
            (TensorName(group, name), file, share.cut)
            for group, files in self.groups.items()
            for file in files
            for name, shares in self.shares[file].items()
            for share in shares
            if share.writer == rank
        ]


class Holding(NamedTuple):
    """A description of the part that one rank has of a tensor.

    Attributes:
        tensor: The dtype and shape of the full tensor.
        cut: The region of the part; None for the full tensor.
        differs: Whether the values may differ on ranks that have the same part.
    """

    tensor: Described
    cut: Region | None
    differs: bool


class Inventory(NamedTuple):
    """Descriptions of the parts of tensors that one rank has, by the tensors' names."""

    tensors: Mapping[TensorName, Holding]

    @classmethod
    def describe(cls, local: Mapping[TensorName, LocalTensor]) -> Inventory:
        """Describes the tensors that this rank has.

        Raises:
            CheckpointError: safetensors lacks the dtype of a tensor.
        """
        holdings = {
            name: Holding(tensor.described, tensor.cut, tensor.differs)
            for name, tensor in local.items()
        }
        for name, holding in holdings.items():
            if holding.tensor.dtype not in CODES:
                raise CheckpointError(
                    f"{name} cannot be saved: safetensors has no {holding.tensor.dtype}",
                    expected=", ".join(CODES),
                    fix="store it as two tensors, or in another dtype",
                )
        return cls(holdings)

    def to_json(self) -> str:
        """Returns the inventory as JSON for :meth:`from_json`, to send it to other ranks."""
        return json.dumps([[*name, *holding] for name, holding in self.tensors.items()])

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        """Reads an inventory from the text of :meth:`to_json`."""
        return cls(
            {
                TensorName(group, name): Holding(
                    Described(dtype, tuple(shape)), None if cut is None else Region(*cut), differs
                )
                for group, name, (dtype, shape), cut, differs in json.loads(text)
            }
        )


def plan_files(inventories: Sequence[Inventory]) -> FilePlan:
    """Plans the files of a checkpoint; each rank computes the same plan.

    Args:
        inventories: What each rank has, in the order of the ranks.

    Raises:
        CheckpointError: Ranks have different tensors under one name, or a part is on no rank.
    """
    full_tensors: dict[TensorName, Described] = {}
    holders: dict[TensorName, dict[Region | None, list[int]]] = {}
    for rank, inventory in enumerate(inventories):
        for name, (tensor, cut, differs) in inventory.tensors.items():
            if full_tensors.setdefault(name, tensor) != tensor:
                raise CheckpointError(
                    f"the ranks do not have the same {name}",
                    expected=str(full_tensors[name]),
                    got=f"{tensor} on rank {rank} of the job",
                    fix="build the same model and the same optimizer on every rank",
                )
            ranks = holders.setdefault(name, {}).setdefault(cut, [])
            # Of values that may differ, those of the first rank are written.
            if not (differs and ranks):
                ranks.append(rank)
    shares = _choose_writers(full_tensors, holders, len(inventories))
    files: dict[str, Layout] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        names = sorted((name for name in full_tensors if name.group == group), key=_natural_key)
        layouts = _split_into_files(group, {name.name: full_tensors[name] for name in names})
        if layouts:
            groups[group] = tuple(layouts)
        files.update(layouts)
    return FilePlan(
        files,
        groups,
        {
            file: {name: shares[TensorName(group, name)] for name in files[file].tensors}
            for group, names in groups.items()
            for file in names
        },
    )


def _natural_key(name: TensorName) -> list[str | int]:
    """Returns a sort key that puts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in _DIGITS.split(name.name)]


def _split_into_files(group: str, tensors: Mapping[str, Described]) -> dict[str, Layout]:
    """Distributes a group's tensors to files, in order, and returns the layouts by file name.

    A file has at most ``FILE_BYTES``, or one larger tensor.
    """
    contents: list[dict[str, Described]] = []
    # The bytes of the last file so far.
    filled = 0
    for name, tensor in tensors.items():
        if not contents or (filled and filled + tensor.nbytes > FILE_BYTES):
            contents.append({})
            filled = 0
        contents[-1][name] = tensor
        filled += tensor.nbytes
    count = len(contents)
    return {
        f"{group}-{number:05d}-of-{count:05d}.safetensors": layout_of(content)
        for number, content in enumerate(contents, 1)
    }


def _choose_writers(
    full_tensors: Mapping[TensorName, Described],
    holders: Mapping[TensorName, Mapping[Region | None, Sequence[int]]],
    ranks: int,
) -> dict[TensorName, tuple[Share, ...]]:
    """Chooses the writer of each part: the holder with the fewest bytes so far, largest part first.

    Args:
        full_tensors: The dtype and shape of each full tensor.
        holders: For each tensor, the ranks that have a part, by the region of the part.
        ranks: The number of ranks.

    Returns:
        For each tensor its parts with their writers, in their order along the axis.
    """
    load = [0] * ranks
    shares: dict[TensorName, list[Share]] = {name: [] for name in full_tensors}
    parts = [
        (math.prod(tensor.shape if cut is None else cut.part(tensor.shape)), name, cut)
        for name, tensor in full_tensors.items()
        for cut in _select_tiling(name, tensor, [*holders[name]])
    ]
    parts.sort(key=lambda part: (-part[0], _natural_key(part[1])))
    for size, name, cut in parts:
        writer = min(holders[name][cut], key=lambda rank: (load[rank], rank))
        load[writer] += size * full_tensors[name].itemsize
        shares[name].append(Share(cut, writer))
    return {
        name: tuple(sorted(parts, key=lambda share: 0 if share.cut is None else share.cut.start))
        for name, parts in shares.items()
    }


def _select_tiling(
    name: TensorName, tensor: Described, cuts: list[Region | None]
) -> list[Region | None]:
    """Selects, in order, regions that make up the full tensor without overlap.

    Args:
        name: The name of the tensor, for the error.
        tensor: The dtype and shape of the full tensor.
        cuts: The regions that any rank has.

    Raises:
        CheckpointError: The ranks do not have the full tensor together.
    """
    full = [cut for cut in cuts if cut is None or cut.stop - cut.start == cut.size]
    if full:
        return full[:1]
    ordered = sorted(cut for cut in cuts if cut is not None)
    if not make_up_tensor(ordered, tensor.shape):
        raise CheckpointError(
            f"the ranks do not hold the whole of {name}",
            expected=str(tensor),
            got=", ".join(f"{cut.start} to {cut.stop} of axis {cut.axis}" for cut in ordered),
            fix="build the same model on every rank, with the same mp_degree",
        )
    return [*ordered]


def indexes(plan: FilePlan) -> dict[str, str]:
    """Returns the text of the index file of each group, which maps tensors to files.

    The format is Hugging Face's; PaddleNLP's unified checkpoint has such a file for each group.
    """
    indexes_by_file = {}
    for group, files in plan.groups.items():
        file_of_tensor = {name: file for file in files for name in plan.files[file].tensors}
        total = sum(t.tensor.nbytes for file in files for t in plan.files[file].tensors.values())
        index: dict[str, object] = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
        if group == OPTIMIZER:
            index["master_weights"] = MASTER_WEIGHTS in plan.groups
        indexes_by_file[f"{group}.safetensors.index.json"] = json.dumps(
            index, sort_keys=True, indent=1
        )
    return indexes_by_file
