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
    bits_dtype,
    cover_without_overlap,
    join_names,
    lazy_array,
    lazy_stored_tensor,
    other_files,
    paddle_tensor,
    scheduler_in,
    write_scheduler_and_files,
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
#: The prefix of names such as ``0.weight`` in Paddle's language, where none begins with a digit.
_NUMBERED = "numbered_"
#: The places in a statement where it is put.
_NUMBER = re.compile(r"(?<![\w.$])(?=\d+\.|\$LAYER_ID\.)")
_MISFITS = (AssertionError, ValueError, LookupError, SyntaxError, RuntimeError)

#: PaddleFormers' folder of each group.
FOLDERS = {MODEL: "model_state", OPTIMIZER: "optimizer_state", MASTER_WEIGHTS: "master_weight"}
#: The endings of the file of metadata and of the ranks' files.
_METADATA, _SHARD = ".metadata", ".distcp"
#: The last part of the name of a master weight.
_MASTER = "w_0"
#: The most bytes of tensors in a file, which are in memory at once.
SHARD_BYTES = 128 << 20
#: Paddle's function, whose stub knows tensors only.
_save: Any = paddle.save


class Copied(NamedTuple):
    """A part of a tensor that becomes a part of a new tensor.

    Attributes:
        source: The name of the tensor that it is read from.
        taken: The region of the source that is read.
        put: The region of the new tensor that the part fills.
        orders: The permutations of axes that are applied, one after another.
        casts: The dtypes that the part is cast to, one after another.
    """

    source: str
    taken: tuple[slice, ...]
    put: tuple[slice, ...]
    orders: tuple[list[int], ...]
    casts: tuple[str, ...]


def _import_flex_checkpoint(name: str) -> Any:
    """Imports a module of Paddle's ``flex_checkpoint``; raises ConfigError if it has none."""
    try:
        return importlib.import_module(f"paddle.distributed.flex_checkpoint.{name}")
    except ImportError:
        raise ConfigError(
            f"Paddle {VERSION} has no flex_checkpoint, which this conversion needs",
            fix="convert with Paddle 3.3",
        ) from None


def metadata_of(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> Any:
    """Returns Paddle's metadata of a checkpoint in which every tensor is whole.

    Args:
        tensors: The dtype, the shape and the file of each tensor, by name.
    """
    classes = _import_flex_checkpoint(_METADATA_MODULE)
    described, files = {}, {}
    for name, (dtype, shape, file) in tensors.items():
        begin = (0,) * len(shape)
        described[name] = [classes.LocalTensorMetadata(begin, shape, dtype, shape)]
        files[classes.LocalTensorIndex(name, begin, local_shape=shape)] = file
    return classes.Metadata(described, files, {name: (name,) for name in tensors})


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
        ConfigError: This Paddle has no ``aoa_config``, or a statement does not fit the model.
    """
    described = _import_flex_checkpoint("dcp.sharded_weight").ShardedWeightDesc
    shards = {}
    for name, (dtype, shape) in shapes.items():
        word = _NUMBER.sub(_NUMBERED, name)
        shards[word] = [described(word, shape, shape, (0,) * len(shape), dtype)]
    config = {
        "aoa_statements": [_NUMBER.sub(_NUMBERED, statement) for statement in statements],
        "aoa_config_reverse": reverse,
        "enable_traceback": False,
    }
    new_engine = _import_flex_checkpoint("aoa.aoa_engine").AOAEngine
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
        outputs[name] = tuple(_copied_part(*part) for part in tensor.slices)
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
    overwritten = [name for name in shapes if name not in read and name not in left_out]
    if overwritten:
        raise ConfigError(
            "of statements that make the same tensor one would count alone",
            got=f"nothing is made of {', '.join(overwritten[:10])}",
            fix="give each tensor a name of its own; 'name -> _' leaves one out",
        )
    return outputs, unread


def _copied_part(
    source: str, taken: Sequence[slice], put: Sequence[slice], steps: Sequence[str] | None
) -> Copied:
    """Returns a :class:`Copied` from the description by Paddle's engine.

    Args:
        source: The name of the source, as Paddle's engine writes it.
        taken: The region of the source.
        put: The region of the new tensor.
        steps: Permutations, such as ``"[1, 0]"``, and dtypes, as text; None for none.
    """
    orders = tuple(ast.literal_eval(step) for step in steps or () if step.startswith("["))
    casts = tuple(step for step in steps or () if not step.startswith("["))
    return Copied(source.removeprefix(_NUMBERED), tuple(taken), tuple(put), orders, casts)


class _StoredPart(NamedTuple):
    """A part of a tensor, and the file that has it.

    Attributes:
        file: The file.
        name: The name of the tensor in the file.
        begin: The begin of the part in the full tensor, on each axis.
        shape: The shape of the part.
        range: The range of the flattened part that the file has; None for all of it.
    """

    file: Path
    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    range: tuple[int, int] | None

    def is_in(self, cut: Region | None) -> bool:
        """Returns whether the part overlaps a region of the full tensor; None is all of it."""
        if cut is None:
            return True
        begin = self.begin[cut.axis]
        return begin < cut.stop and cut.start < begin + self.shape[cut.axis]

    def put(self, values: np.ndarray, full: np.ndarray) -> None:
        """Copies the values of the part into the full tensor."""
        region = full[tuple(slice(b, b + n) for b, n in zip(self.begin, self.shape))]
        if self.range is None:
            region[...] = values
        else:
            region.flat[slice(*self.range)] = values


def is_distributed(folder: Path) -> bool:
    """Returns whether a folder has files of a distributed checkpoint."""
    return any([*folder.glob(f"[0-9]*{_METADATA}"), *folder.glob(f"*{_SHARD}")])


def is_formers(folder: Path) -> bool:
    """Returns whether a folder has the subfolders of PaddleFormers' Trainer."""
    return is_distributed(folder / FOLDERS[MODEL])


def read_folder(folder: Path) -> Checkpoint:
    """Reads the metadata, and the names and shapes in each file of tensors.

    Raises:
        CheckpointError: A file is damaged or missing; the message names it.
    """
    of_group = {group: folder / name for group, name in FOLDERS.items()}
    if is_formers(folder):
        contents = {
            TensorName(group, name): tensor
            for group, subfolder in of_group.items()
            if subfolder.is_dir()
            for name, tensor in _checkpoint_names(group, _ShardedFolder(subfolder).tensors)
        }
    else:
        by_name = _ShardedFolder(folder).tensors
        contents = {_tensor_name(name, by_name): tensor for name, tensor in by_name.items()}
    files = other_files(folder, f"*{_METADATA}", f"*{_SHARD}", "*.safetensors", SCHEDULER)
    return Checkpoint(contents, None, scheduler_in(folder), files)


def _checkpoint_names(
    group: str, named: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the tensors of one of PaddleFormers' folders, with their names in a ``Checkpoint``."""
    for name, tensor in named.items():
        parameter, _, kind = name.rpartition(".")
        if group == OPTIMIZER:
            yield f"{parameter}/{kind}", tensor
        else:
            yield (parameter if group == MASTER_WEIGHTS else name), tensor


def _tensor_name(name: str, tensors: Mapping[str, LazyTensor]) -> TensorName:
    """Returns the group and name that a tensor of a single folder has in a ``Checkpoint``.

    Args:
        name: The name in the folder; the name of an optimizer's tensor begins with the parameter's.
        tensors: All tensors of the folder.
    """
    parameter, _, kind = name.rpartition(".")
    if parameter not in tensors:
        return TensorName(MODEL, name)
    if kind == _MASTER:
        return TensorName(MASTER_WEIGHTS, parameter)
    return TensorName(OPTIMIZER, f"{parameter}/{kind}")


class _ShardedFolder:
    """One folder with a file of metadata and files of parts of tensors.

    Attributes:
        tensors: All tensors by name, joined from their parts when they are read.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the metadata, and the names and shapes in the files.

        Raises:
            CheckpointError: A file is damaged or missing.
        """
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
            self._file_of_part = {
                (key.fields["tensor_key"], _position_of(key)): Path(file).name
                for key, file in metadata["storage_metadata"].items()
            }
            self.tensors = {
                name: self._full_tensor(name, [*dict.fromkeys(self._parts_of(name))])
                for name in self._described
            }
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise tensors.damage(self._path, f"{type(error).__name__}: {error}"[:200]) from error

    def _parts_of(self, name: str) -> Iterator[_StoredPart]:
        """Yields the parts of a tensor, as the metadata list them."""
        for record in self._described[name]:
            begin, flat_range = _position_of(record)
            if (name, (begin, flat_range)) not in self._file_of_part:
                raise KeyError(f"no file for the part of {name!r} at {[*begin]}")
            file = self._folder / self._file_of_part[name, (begin, flat_range)]
            shape = tuple(record.fields["local_shape"])
            yield _StoredPart(file, name, begin, shape, flat_range)

    def _full_tensor(self, name: str, parts: list[_StoredPart]) -> LazyTensor:
        """Returns a tensor that is joined from its parts when it is read.

        Raises:
            CheckpointError: The parts do not form the tensor.
        """
        stored = [self._tensor_of_part(part) for part in parts]
        fields = self._described[name][0].fields
        dtype = fields.get("dtype") or stored[0].described.dtype
        ends = zip(*(map(sum, zip(part.begin, part.shape)) for part in parts))
        shape = tuple(fields.get("global_shape") or map(max, ends))
        described = Described(dtype, shape)
        if not all(map(is_shape, (shape, *(part.shape for part in parts)))):
            raise ValueError(f"{name!r} has no shape of a tensor")
        if dtype not in CODES or any(tensor.described.dtype != dtype for tensor in stored):
            got = ", ".join(dict.fromkeys(tensor.described.dtype for tensor in stored))
            raise tensors.damage(parts[0].file, f"{name!r} has parts of {got}, not of {dtype}")
        if not _form_whole_tensor(parts, shape):
            places = join_names([f"{[*part.shape]} at {[*part.begin]}" for part in parts])
            raise tensors.damage(
                self._path, f"parts that are not the whole of {name!r}, {described}: {places}"
            )

        def read(cut: Region | None) -> np.ndarray:
            if len(stored) == 1 and stored[0].described.shape == shape:
                return stored[0].read(cut)
            full = np.empty(shape, bits_dtype(described))
            for part, tensor in zip(parts, stored):
                if part.is_in(cut):
                    part.put(tensor.read(), full)
            return full if cut is None else cut.taken_from(full)

        return LazyTensor(described, read)

    def _tensor_of_part(self, part: _StoredPart) -> LazyTensor:
        """Returns the tensor in a file for a part; raises CheckpointError if its size is wrong."""
        if part.file not in self._files:
            self._files[part.file] = _read_tensors(part.file)
        tensor = self._files[part.file].get(part.name)
        if tensor is None:
            raise tensors.damage(part.file, f"no {part.name!r}, which {self._path.name} has there")
        shape = part.shape if part.range is None else (part.range[1] - part.range[0],)
        if tensor.described.shape != shape:
            got = f"{part.name!r} is {tensor.described}, and {self._path.name} says {list(shape)}"
            raise tensors.damage(part.file, got)
        return tensor


def _form_whole_tensor(parts: Iterable[_StoredPart], shape: tuple[int, ...]) -> bool:
    """Returns whether parts form a full tensor, and the flat ranges of each part form that part."""
    ranges: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for part in parts:
        flat = part.range or (0, math.prod(part.shape))
        ranges.setdefault((part.begin, part.shape), []).append(flat)
    return cover_without_overlap(ranges, shape) and all(
        cover_without_overlap([([begin], [end - begin]) for begin, end in flat], [math.prod(box)])
        for (_, box), flat in ranges.items()
    )


def _position_of(record: PickledObject) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Returns the begin, on each axis, of a record's part; and its range if it is flat."""
    flat = record.fields.get("flattened_range")
    return tuple(record.fields["global_offset"]), None if flat is None else (flat[0], flat[1])


def _read_tensors(path: Path) -> Mapping[str, LazyTensor]:
    """Returns the tensors in one of the ranks' files by name."""
    if path.suffix == ".safetensors" and path.is_file():
        layout = tensors.read_layout(path)
        return {name: lazy_stored_tensor(path, stored) for name, stored in layout.tensors.items()}
    return {name: lazy_array(path, array) for name, array in fleet_files.mapped(path).items()}


def write_folder(state: Checkpoint, folder: Path) -> None:
    """Writes a single folder for ``paddle.distributed.load_state_dict``."""
    _write_shards(
        {_distributed_name(name): tensor for name, tensor in state.tensors.items()}, folder
    )
    write_scheduler_and_files(state, folder)


def write_formers(state: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint for PaddleFormers' Trainer with ``flex_checkpoint``, its default."""
    for group, name in FOLDERS.items():
        (folder / name).mkdir()
        of_group = {
            _distributed_name(TensorName(group, n)): tensor for n, tensor in state.of(group).items()
        }
        _write_shards(of_group, folder / name)
    write_scheduler_and_files(state, folder)


def _distributed_name(name: TensorName) -> str:
    """Returns the name of a tensor in a distributed checkpoint."""
    if name.group == MASTER_WEIGHTS:
        return f"{name.name}.{_MASTER}"
    return name.name.replace("/", ".") if name.group == OPTIMIZER else name.name


def _write_shards(named: Mapping[str, LazyTensor], folder: Path) -> None:
    """Writes metadata, and tensors in files of at most ``SHARD_BYTES``.

    ``paddle.save`` has all tensors of a file in memory at once.

    Args:
        named: The tensors, by their names in the checkpoint.
        folder: The folder to write into.
    """
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
