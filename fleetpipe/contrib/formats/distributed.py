"""Paddle's distributed checkpoint: ``0.metadata``, and ``*.distcp`` with the ranks' parts.

``paddle.distributed.save_state_dict`` writes a single folder; PaddleFormers' Trainer one folder for
each of model, optimizer and master weights. An optimizer's tensor is ``name.moment1_0`` there, and
a master weight ``name.w_0``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MASTER_WEIGHTS, MODEL, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.tensors import CODES
from fleetpipe.contrib.formats import flex_checkpoint
from fleetpipe.contrib.formats.contents import (
    SCHEDULER,
    Checkpoint,
    LazyTensor,
    are_whole,
    bits,
    join_names,
    lazy_array,
    other_files,
    paddle_tensor,
    scheduler_in,
    stored_tensor,
    write_rest,
)
from fleetpipe.errors import CheckpointError, is_shape
from fleetpipe.fleet_files.pickled import PickledObject
from fleetpipe.mesh.parts import Described, Region
from fleetpipe.paddle_api import paddle

#: PaddleFormers' folder of each group.
FOLDERS = {
    MODEL: "model_state",
    OPTIMIZER: "optimizer_state",
    MASTER_WEIGHTS: "master_weight",
}
_METADATA, _SHARD = ".metadata", ".distcp"
_MASTER = "w_0"
#: Bytes of tensors after which the next file begins: as many are in memory at once.
SHARD_BYTES = 128 << 20
#: Paddle's function, whose stub knows tensors only.
_save: Any = paddle.save


class _Part(NamedTuple):
    """The part of a tensor that one file has.

    Attributes:
        file: The file.
        name: The name of the tensor in the file.
        begin: The begin of the part in the whole tensor, on each axis.
        shape: The shape of the part.
        range: The range of the flattened part that the file has; None for all.
    """

    file: Path
    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    range: tuple[int, int] | None

    def is_in(self, cut: Region | None) -> bool:
        """Whether it overlaps a part of the whole tensor."""
        if cut is None:
            return True
        begin = self.begin[cut.axis]
        return begin < cut.stop and cut.start < begin + self.shape[cut.axis]

    def put(self, values: np.ndarray, whole: np.ndarray) -> None:
        """Copies its values into the whole tensor."""
        inner = whole[tuple(slice(b, b + n) for b, n in zip(self.begin, self.shape))]
        if self.range is None:
            inner[...] = values
        else:
            inner.flat[slice(*self.range)] = values


def is_there(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return any([*folder.glob(f"[0-9]*{_METADATA}"), *folder.glob(f"*{_SHARD}")])


def is_formers(folder: Path) -> bool:
    """Whether a folder has the subfolders of PaddleFormers' Trainer."""
    return is_there(folder / FOLDERS[MODEL])


def read_folder(folder: Path) -> Checkpoint:
    """Reads the metadata and the index of each file of tensors.

    Raises:
        CheckpointError: One is damaged or missing; the message names the file.
    """
    of_group = {group: folder / name for group, name in FOLDERS.items()}
    if is_formers(folder):
        contents = {
            TensorName(group, name): tensor
            for group, inner in of_group.items()
            if inner.is_dir()
            for name, tensor in _rename(group, _Shards(inner).tensors)
        }
    else:
        whole = _Shards(folder).tensors
        contents = {_meaning(name, whole): tensor for name, tensor in whole.items()}
    rest = other_files(folder, f"*{_METADATA}", f"*{_SHARD}", "*.safetensors", SCHEDULER)
    return Checkpoint(contents, None, scheduler_in(folder), rest)


def _rename(group: str, named: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    for name, tensor in named.items():
        parameter, _, kind = name.rpartition(".")
        if group == OPTIMIZER:
            yield f"{parameter}/{kind}", tensor
        else:
            yield (parameter if group == MASTER_WEIGHTS else name), tensor


def _meaning(name: str, everything: Mapping[str, LazyTensor]) -> TensorName:
    """Tells a model's tensor from an optimizer's, whose name begins with its parameter's name."""
    parameter, _, kind = name.rpartition(".")
    if parameter not in everything:
        return TensorName(MODEL, name)
    if kind == _MASTER:
        return TensorName(MASTER_WEIGHTS, parameter)
    return TensorName(OPTIMIZER, f"{parameter}/{kind}")


class _Shards:
    """One folder with metadata and shards.

    Attributes:
        tensors: All tensors, whole.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the metadata and the indices of the files."""
        metadata_files = sorted(folder.glob(f"*{_METADATA}"))
        if len(metadata_files) != 1:
            raise CheckpointError(
                f"a distributed checkpoint has one file *{_METADATA}",
                where=str(folder),
                got=", ".join(path.name for path in metadata_files) or "none: its save did not end",
                fix="convert another step, or move files of other saves away",
            )
        self._folder, (self._path,) = folder, metadata_files
        self._files: dict[Path, Mapping[str, LazyTensor]] = {}
        metadata = fleet_files.record(self._path, flex_checkpoint.RECORDS).fields
        try:
            self._described: dict[str, list[PickledObject]] = metadata["state_dict_metadata"]
            self._places = {
                (key.fields["tensor_key"], _place_of(key)): Path(file).name
                for key, file in metadata["storage_metadata"].items()
            }
            self.tensors = {
                name: self._whole_tensor(name, [*dict.fromkeys(self._parts_of(name))])
                for name in self._described
            }
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise tensors.damage(self._path, f"{type(error).__name__}: {error}"[:200]) from error

    def _parts_of(self, name: str) -> Iterator[_Part]:
        for record in self._described[name]:
            place = _place_of(record)
            if (name, place) not in self._places:
                raise KeyError(f"no file for the part of {name!r} at {[*place[0]]}")
            file = self._folder / self._places[name, place]
            shape = tuple(record.fields["local_shape"])
            yield _Part(file, name, place[0], shape, place[1])

    def _whole_tensor(self, name: str, parts: list[_Part]) -> LazyTensor:
        pieces = [self._piece(part) for part in parts]
        fields = self._described[name][0].fields
        dtype = fields.get("dtype") or pieces[0].described.dtype
        ends = zip(*(map(sum, zip(part.begin, part.shape)) for part in parts))
        shape = tuple(fields.get("global_shape") or map(max, ends))
        described = Described(dtype, shape)
        if not all(map(is_shape, (shape, *(part.shape for part in parts)))):
            raise ValueError(f"{name!r} has no shape of a tensor")
        if dtype not in CODES or any(piece.described.dtype != dtype for piece in pieces):
            got = ", ".join(dict.fromkeys(piece.described.dtype for piece in pieces))
            raise tensors.damage(parts[0].file, f"{name!r} has parts of {got}, not of {dtype}")
        if not _are_whole(parts, shape):
            places = join_names([f"{[*part.shape]} at {[*part.begin]}" for part in parts])
            raise tensors.damage(
                self._path, f"parts that are not the whole of {name!r}, {described}: {places}"
            )

        def read(cut: Region | None) -> np.ndarray:
            if len(pieces) == 1 and pieces[0].described.shape == shape:
                return pieces[0].read(cut)
            whole = np.empty(shape, bits(described))
            for part, piece in zip(parts, pieces):
                if part.is_in(cut):
                    part.put(piece.read(), whole)
            return whole if cut is None else cut.taken_from(whole)

        return LazyTensor(described, read)

    def _piece(self, part: _Part) -> LazyTensor:
        """Returns the tensor in a file for a part, after checking its size."""
        if part.file not in self._files:
            self._files[part.file] = _contents(part.file)
        piece = self._files[part.file].get(part.name)
        if piece is None:
            raise tensors.damage(part.file, f"no {part.name!r}, which {self._path.name} has there")
        shape = part.shape if part.range is None else (part.range[1] - part.range[0],)
        if piece.described.shape != shape:
            got = f"{part.name!r} is {piece.described}, and {self._path.name} says {list(shape)}"
            raise tensors.damage(part.file, got)
        return piece


def _are_whole(parts: Iterable[_Part], shape: tuple[int, ...]) -> bool:
    """Whether parts form a whole tensor; flat ranges must first form their parts."""
    ranges: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for part in parts:
        flat = part.range or (0, math.prod(part.shape))
        ranges.setdefault((part.begin, part.shape), []).append(flat)
    return are_whole(ranges, shape) and all(
        are_whole([([begin], [end - begin]) for begin, end in flat], [math.prod(box)])
        for (_, box), flat in ranges.items()
    )


def _place_of(record: PickledObject) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Returns the begin of a part, and its range if it is flat."""
    flat = record.fields.get("flattened_range")
    return tuple(record.fields["global_offset"]), None if flat is None else (flat[0], flat[1])


def _contents(path: Path) -> Mapping[str, LazyTensor]:
    """Returns the tensors in a file of shards."""
    if path.suffix == ".safetensors" and path.is_file():
        layout = tensors.read_layout(path)
        return {name: stored_tensor(path, stored) for name, stored in layout.tensors.items()}
    return {name: lazy_array(path, array) for name, array in fleet_files.mapped(path).items()}


def write_folder(state: Checkpoint, folder: Path) -> None:
    """Writes a single folder for ``paddle.distributed.load_state_dict``."""
    _write({_flat(name): tensor for name, tensor in state.tensors.items()}, folder)
    write_rest(state, folder)


def write_formers(state: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint for PaddleFormers' Trainer with ``flex_checkpoint``, its default."""
    for group, name in FOLDERS.items():
        (folder / name).mkdir()
        of_group = {_flat(TensorName(group, n)): tensor for n, tensor in state.of(group).items()}
        _write(of_group, folder / name)
    write_rest(state, folder)


def _flat(name: TensorName) -> str:
    if name.group == MASTER_WEIGHTS:
        return f"{name.name}.{_MASTER}"
    return name.name.replace("/", ".") if name.group == OPTIMIZER else name.name


def _write(named: Mapping[str, LazyTensor], folder: Path) -> None:
    """Writes metadata and shards of a limited size, as ``paddle.save`` writes whole files."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in named.items():
        if filled and filled + tensor.described.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.described.nbytes
    described = {}
    for number, names in enumerate(shards):
        file = f"{number}_0{_SHARD}"
        contents = {name: paddle_tensor(named[name]) for name in names}
        for name in names:
            contents[name].name = name
            described[name] = (*named[name].described, file)
        _save(contents, str(folder / file))
        del contents
    _save(flex_checkpoint.metadata_of(described), str(folder / f"0{_METADATA}"))
