"""A checkpoint of any format in memory: tensors that are read on demand, and other contents.

Tensors are in groups: model, optimizer, master weights. Their names are those of fleetpipe's own
checkpoints: an optimizer's tensor is ``3.weight/moment1_0``, the parameter's name and its kind, and
a master weight has the name of its parameter.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.contents.training_state import as_json
from fleetpipe.checkpoint.files import tensors, writer
from fleetpipe.checkpoint.files.manifest import tensor_digest
from fleetpipe.checkpoint.files.tensors import (
    CODES,
    FilePlan,
    Holding,
    Inventory,
    Stored,
    plan_files,
)
from fleetpipe.mesh.parts import Described, LocalTensor, Region

#: The file of a learning rate's scheduler in checkpoints of PaddleNLP and PaddleFormers.
SCHEDULER = "scheduler.pdparams"
#: The most names that an error shows.
MOST_SHOWN = 10


class LazyTensor(NamedTuple):
    """A tensor of a checkpoint, whose values are read on demand.

    Attributes:
        described: The dtype and shape of the tensor.
        read_part: Reads a region of the tensor, or all of it for None; :meth:`read` calls it.
    """

    described: Described
    read_part: Callable[[Region | None], np.ndarray]

    def read(self, cut: Region | None = None) -> np.ndarray:
        """Reads a region of the tensor; by default, or for None, the full tensor.

        Returns:
            Unsigned integers that have the bits of the tensor's elements.
        """
        return self.read_part(cut)

    def digest(self) -> str:
        """Returns the digest of dtype, shape and bits, as in the hash of a model."""
        return tensor_digest(self.described, [memory_of(np.ascontiguousarray(self.read()))])


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        tensors: The tensors, those of the model in the model's order.
        step: The step after which the checkpoint was saved; None if unknown.
        scheduler: The state of the learning rate's scheduler; None without one.
        files: Other files in the folder, such as a tokenizer's, which are copied and not read.
        plain_order: For each tensor of the model, in the order of ``tensors``, the name in the
            model as a single-device script builds it. Empty if unknown or the same; the names in
            ``tensors`` themselves if a map of names has sorted them.
    """

    tensors: Mapping[TensorName, LazyTensor]
    step: int | None = None
    scheduler: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()
    plain_order: tuple[str, ...] = ()

    def of(self, group: str) -> dict[str, LazyTensor]:
        """Returns the tensors of a group, such as "model", by their names in it."""
        return {name.name: tensor for name, tensor in self.tensors.items() if name.group == group}

    def with_plain_names(self) -> Checkpoint:
        """Returns the checkpoint with the names of the model without the pipeline, if known.

        A tensor of the optimizer is named after its parameter.
        """
        plain_names = dict(zip(self.of(MODEL), self.plain_order))

        def plain_name(name: TensorName) -> TensorName:
            parameter, slash, kind = name.name.partition("/")
            return name._replace(name=plain_names.get(parameter, parameter) + slash + kind)

        tensors = {plain_name(name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, plain_order=())

    def plan_of_files(self) -> FilePlan:
        """Returns the safetensors files that a save of the checkpoint writes, and their tensors."""
        holdings = {
            name: Holding(one.described, None, differs=False) for name, one in self.tensors.items()
        }
        return plan_files([Inventory(holdings)])


def join_names(names: list[str]) -> str:
    """Joins at most ten names for an error's text, and says how many more there are."""
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def bits_dtype(described: Described) -> np.dtype:
    """Returns the unsigned integer dtype of an array that holds a tensor's bits."""
    return np.dtype(f"u{described.itemsize}")


def lazy_stored_tensor(path: Path, stored: Stored) -> LazyTensor:
    """Returns a tensor of a file that stores its rows one after another, as safetensors files do.

    Args:
        path: The file.
        stored: The dtype, the shape and the position in the file.
    """

    def read(cut: Region | None) -> np.ndarray:
        shape = stored.tensor.shape
        array = np.empty(shape if cut is None else cut.part(shape), bits_dtype(stored.tensor))
        try:
            with FileIO(str(path)) as file:
                tensors.read(file, stored, cut, memory_of(array))
        except (OSError, EOFError) as error:
            raise tensors.damage(path, f"{type(error).__name__}: {error}") from error
        return array

    return LazyTensor(stored.tensor, read)


def cover_without_overlap(
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]
) -> bool:
    """Returns whether boxes cover a whole tensor, and no two of them overlap.

    Args:
        boxes: For each box its first index on each axis, and its size on each axis.
        shape: The shape of the whole tensor.
    """
    bounds = [(begin, [b + n for b, n in zip(begin, size)]) for begin, size in boxes]
    if any(len(begin) != len(shape) or len(end) != len(shape) for begin, end in bounds):
        return False
    # The bounds of all boxes cut the tensor into a grid, in which each box is some cells.
    grid = []
    for axis, size in enumerate(shape):
        edges = sorted({0, size, *(corner[axis] for pair in bounds for corner in pair)})
        if edges[0] < 0 or edges[-1] > size:
            return False
        grid.append(edges)
    counts = np.zeros([len(edges) - 1 for edges in grid], int)
    for begin, end in bounds:
        cells = tuple(
            slice(*np.searchsorted(edges, (first, last)))
            for edges, first, last in zip(grid, begin, end)
        )
        counts[cells] += 1
    return bool((counts == 1).all())


def lazy_array(path: Path, array: np.ndarray) -> LazyTensor:
    """Returns a memory-mapped array of a file of ``paddle.save`` as a tensor.

    Raises:
        CheckpointError: ``array`` is no array, or of a dtype that no tensor has.
    """
    if not isinstance(array, np.ndarray):
        raise tensors.damage(path, f"a {type(array).__name__} in the place of a tensor")
    described = LocalTensor(array).described
    if described.dtype not in CODES:
        raise tensors.damage(path, f"an array of {described.dtype}")

    def read(cut: Region | None) -> np.ndarray:
        values = array if cut is None else cut.taken_from(array)
        native = values.astype(values.dtype.newbyteorder("="), order="C", copy=False)
        return native.view(bits_dtype(described))

    return LazyTensor(described, read)


def memory_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def paddle_tensor(tensor: LazyTensor) -> Any:
    """Reads a tensor of a checkpoint into a new Paddle tensor."""
    value, memory = writer.empty(tensor.described)
    memory[:] = memory_of(np.ascontiguousarray(tensor.read()))
    return value


def scheduler_in(folder: Path) -> Mapping[str, Any] | None:
    """Returns the state of the learning rate's scheduler in a folder; None without one.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / SCHEDULER
    return as_json(fleet_files.arrays(path), SCHEDULER) if path.is_file() else None


def write_scheduler_and_files(state: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint's scheduler state, and copies the files that are not read.

    Raises:
        OSError: A file cannot be written.
    """
    for file in state.files:
        shutil.copy2(file, folder)
    if state.scheduler is not None:
        fleet_files.save(folder / SCHEDULER, dict(state.scheduler))


def other_files(folder: Path, *patterns: str) -> tuple[Path, ...]:
    """Returns the files of a folder whose names match none of the patterns, sorted by name."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not any(path.match(pattern) for pattern in patterns)
    )
