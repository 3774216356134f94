"""Reads and writes Paddle's distributed checkpoint: ``0.metadata``, and the ranks' ``*.distcp``.

``paddle.distributed.save_state_dict`` writes a single folder; PaddleFormers' Trainer one folder for
each of model, optimizer and master weights. An optimizer's tensor is ``name.moment1_0`` there, and
a master weight ``name.w_0``. Writing and ``compose``, Paddle's language for names, need Paddle 3.3;
the metadata of 2.6.2, with fewer fields, are read too.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MASTER_WEIGHTS, MODEL, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.tensors import CODES
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
from fleetpipe.errors import CheckpointError, ConfigError, is_shape
from fleetpipe.fleet_files.pickled import PickledObject
from fleetpipe.mesh.parts import Described, Region
from fleetpipe.paddle_api import VERSION, paddle

_METADATA_MODULE = "dcp.metadata"
#: The classes in a file of metadata, of 3.3 and of earlier versions.
RECORDS = frozenset(
    f"paddle.distributed.{module}.{name}"
    for module in (f"flex_checkpoint.{_METADATA_MODULE}", "checkpoint.metadata")
    for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
)
#: The prefix of names such as ``0.weight``: the language has no names that begin with a digit.
_NUMBERED = "numbered_"
_NUMBER = re.compile(r"(?<![\w.$])(?=\d+\.|\$LAYER_ID\.)")
_MISFITS = (AssertionError, ValueError, LookupError, SyntaxError, RuntimeError)

#: PaddleFormers' folder of each group.
FOLDERS = {
    MODEL: "model_state",
    OPTIMIZER: "optimizer_state",
    MASTER_WEIGHTS: "master_weight",
}
_METADATA, _SHARD = ".metadata", ".distcp"
_MASTER = "w_0"
#: The most bytes of tensors in a file, which are in memory at once.
SHARD_BYTES = 128 << 20
#: Paddle's function, whose stub knows tensors only.
_save: Any = paddle.save


class Copied(NamedTuple):
    """A part of a tensor that becomes a part of a new tensor.

    Attributes:
        source: The name of the tensor that it is read from.
        taken: The part of the source.
        put: The place in the new tensor.
        orders: The permutations of its axes, one after another.
        casts: The dtypes that it is cast to, one after another.
    """

    source: str
    taken: tuple[slice, ...]
    put: tuple[slice, ...]
    orders: tuple[list[int], ...]
    casts: tuple[str, ...]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"paddle.distributed.flex_checkpoint.{name}")
    except ImportError:
        raise ConfigError(
            f"Paddle {VERSION} has no flex_checkpoint, which this conversion needs",
            fix="convert with Paddle 3.3",
        ) from None


def metadata_of(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> Any:
    """Returns the metadata of a checkpoint in which every tensor is whole.

    Args:
        tensors: The dtype, the shape and the file of each, by name.
    """
    classes = _module(_METADATA_MODULE)
    described, places = {}, {}
    for name, (dtype, shape, file) in tensors.items():
        begin = (0,) * len(shape)
        described[name] = [classes.LocalTensorMetadata(begin, shape, dtype, shape)]
        places[classes.LocalTensorIndex(name, begin, local_shape=shape)] = file
    return classes.Metadata(described, places, {name: (name,) for name in tensors})


def compose(
    statements: Sequence[str], reverse: bool, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, tuple[Copied, ...]], list[str]]:
    """Applies statements of Paddle's ``aoa_config`` to the tensors of a model.

    Args:
        statements: The statements, such as ``"a.weight^T -> b.weight"``.
        reverse: Whether they are read from right to left.
        shapes: The dtype and shape of each tensor of the model, by name.

    Returns:
        The parts of each resulting tensor; and the names that no statement reads.

    Raises:
        ConfigError: This Paddle has no such language, or a statement does not fit the model.
    """
    described = _module("dcp.sharded_weight").ShardedWeightDesc
    words = {_NUMBER.sub(_NUMBERED, name): one for name, one in shapes.items()}
    shards = {
        name: [described(name, shape, shape, (0,) * len(shape), dtype)]
        for name, (dtype, shape) in words.items()
    }
    config = {
        "aoa_statements": [_NUMBER.sub(_NUMBERED, statement) for statement in statements],
        "aoa_config_reverse": reverse,
        "enable_traceback": False,
    }
    new_engine = _module("aoa.aoa_engine").AOAEngine
    try:
        engine = new_engine(config, shards, None)
    except _MISFITS as error:
        raise ConfigError(
            "a statement of the map does not fit the tensors",
            got=str(error)[:300],
            fix="correct it, in the language of Paddle's aoa_config; docs/checkpoints.md has one",
        ) from error
    outputs, unread = {}, []
    for word, tensor in engine.output_vars.items():
        name = word.removeprefix(_NUMBERED)
        # A tensor that no statement reads comes out under its own name.
        if word in engine.input_vars and word not in engine.intermediate_vars:
            unread.append(name)
        outputs[name] = tuple(_copy_of(*part) for part in tensor.slices)
    unknown = [name for name in outputs if "$" in name]
    if unknown:
        raise ConfigError(
            "a statement of the map has an unknown placeholder",
            got=", ".join(unknown[:10]),
            expected="$LAYER_ID or $EXPERT_ID",
            fix="correct it",
        )
    read = {part.source for parts in outputs.values() for part in parts}
    left_out = {word.removeprefix(_NUMBERED) for word in engine.need_remove_input_vars}
    lost = [name for name in shapes if name not in read and name not in left_out]
    if lost:
        raise ConfigError(
            "of statements that make the same tensor one would count alone",
            got=f"nothing is made of {', '.join(lost[:10])}",
            fix="give each tensor a name of its own; 'name -> _' leaves one out",
        )
    return outputs, unread


def _copy_of(
    source: str, taken: Sequence[slice], put: Sequence[slice], steps: Sequence[str] | None
) -> Copied:
    """Returns a part from Paddle's description, whose steps are permutations and dtypes."""
    orders = tuple(ast.literal_eval(step) for step in steps or () if step.startswith("["))
    casts = tuple(step for step in steps or () if not step.startswith("["))
    return Copied(source.removeprefix(_NUMBERED), tuple(taken), tuple(put), orders, casts)


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
        """Whether the part overlaps a region of the whole tensor; None is all of it."""
        if cut is None:
            return True
        begin = self.begin[cut.axis]
        return begin < cut.stop and cut.start < begin + self.shape[cut.axis]

    def put(self, values: np.ndarray, whole: np.ndarray) -> None:
        """Copies the values of the part into the whole tensor."""
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
        CheckpointError: A file is damaged or missing; the message names it.
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
    """Yields the tensors of a folder of PaddleFormers by the names of a ``Checkpoint``."""
    for name, tensor in named.items():
        parameter, _, kind = name.rpartition(".")
        if group == OPTIMIZER:
            yield f"{parameter}/{kind}", tensor
        else:
            yield (parameter if group == MASTER_WEIGHTS else name), tensor


def _meaning(name: str, everything: Mapping[str, LazyTensor]) -> TensorName:
    """Returns a tensor's group and name; an optimizer's begins with its parameter's name."""
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
        metadata = fleet_files.record(self._path, RECORDS).fields
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
        """Returns the tensor in a file for a part; raises CheckpointError if its size is wrong."""
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
    """Whether parts form a whole tensor, and the flat ranges of each part form that part."""
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
    """Returns the name of a tensor in a distributed checkpoint."""
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
    _save(metadata_of(described), str(folder / f"0{_METADATA}"))
