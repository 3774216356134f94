"""A checkpoint of any format in memory: tensors that are read on demand, and other contents.

The names are those of fleetpipe's own checkpoints: ``3.weight/moment1_0`` is the optimizer's, and a
master weight has the name of its parameter.
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
from fleetpipe.checkpoint.contents.training_state import plain
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
#: How many names an error shows.
MOST_SHOWN = 10


class LazyTensor(NamedTuple):
    """A tensor that is read on demand.

    Attributes:
        described: Its dtype and shape.
        read_part: The function that :meth:`read` calls.
    """

    described: Described
    read_part: Callable[[Region | None], np.ndarray]

    def read(self, cut: Region | None = None) -> np.ndarray:
        """Reads a part of the tensor, by default all, as unsigned integers with its bits."""
        return self.read_part(cut)

    def digest(self) -> str:
        """Returns the digest of dtype, shape and bits, as in the hash of a model."""
        return tensor_digest(self.described, [memory_of(np.ascontiguousarray(self.read()))])


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        tensors: The tensors, those of the model in the model's order.
        step: The step after which it was saved; None if unknown.
        scheduler: The state of the learning rate's scheduler; None without one.
        files: Other files in its folder, which are not read.
        plain_order: The plain model's names of the tensors; see ``Saved``.
    """

    tensors: Mapping[TensorName, LazyTensor]
    step: int | None = None
    scheduler: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()
    plain_order: tuple[str, ...] = ()

    def of(self, group: str) -> dict[str, LazyTensor]:
        """Returns the tensors of a group by name."""
        return {name.name: tensor for name, tensor in self.tensors.items() if name.group == group}

    def with_plain_names(self) -> Checkpoint:
        """Returns the checkpoint with the plain model's names, if they are known."""
        plain = dict(zip(self.of(MODEL), self.plain_order))

        def renamed(name: TensorName) -> TensorName:
            parameter, slash, kind = name.name.partition("/")
            return name._replace(name=plain.get(parameter, parameter) + slash + kind)

        tensors = {renamed(name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, plain_order=())

    def plan_of_files(self) -> FilePlan:
        """Plans the safetensors files of the checkpoint."""
        holdings = {name: Holding(one.described, None, False) for name, one in self.tensors.items()}
        return plan_files([Inventory(holdings)])


def join_names(names: list[str]) -> str:
    """Joins names for an error, at most ten."""
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def bits(described: Described) -> np.dtype:
    """Returns the dtype of arrays with the bits of a tensor."""
    return np.dtype(f"u{described.itemsize}")


def stored_tensor(path: Path, stored: Stored) -> LazyTensor:
    """Returns a tensor that a file stores row after row, as safetensors files do."""

    def read(cut: Region | None) -> np.ndarray:
        shape = stored.tensor.shape
        array = np.empty(shape if cut is None else cut.part(shape), bits(stored.tensor))
        try:
            with FileIO(str(path)) as file:
                tensors.read(file, stored, cut, memory_of(array))
        except (OSError, EOFError) as error:
            raise tensors.damage(path, f"{type(error).__name__}: {error}") from error
        return array

    return LazyTensor(stored.tensor, read)


def are_whole(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether parts cover a whole tensor without overlap.

    Args:
        boxes: For each part its begin on each axis, and its shape.
        shape: The shape of the whole tensor.
    """
    parts = [(begin, [b + n for b, n in zip(begin, size)]) for begin, size in boxes]
    if any(len(begin) != len(shape) or len(end) != len(shape) for begin, end in parts):
        return False
    edges = [
        sorted({0, size, *(part[axis] for pair in parts for part in pair)})
        for axis, size in enumerate(shape)
    ]
    if any(one[0] < 0 or one[-1] > size for one, size in zip(edges, shape)):
        return False
    counts = np.zeros([len(one) - 1 for one in edges], int)
    for begin, end in parts:
        counts[tuple(slice(*np.searchsorted(e, pair)) for e, *pair in zip(edges, begin, end))] += 1
    return bool((counts == 1).all())


def lazy_array(path: Path, array: np.ndarray) -> LazyTensor:
    """Returns a memory-mapped array of a file of ``paddle.save`` as a tensor."""
    if not isinstance(array, np.ndarray):
        raise tensors.damage(path, f"a {type(array).__name__} in the place of a tensor")
    described = LocalTensor(array).described
    if described.dtype not in CODES:
        raise tensors.damage(path, f"an array of {described.dtype}")

    def read(cut: Region | None) -> np.ndarray:
        values = array if cut is None else cut.taken_from(array)
        native = values.astype(values.dtype.newbyteorder("="), order="C", copy=False)
        return native.view(bits(described))

    return LazyTensor(described, read)


def memory_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def paddle_tensor(tensor: LazyTensor) -> Any:
    """Reads a tensor as a Paddle tensor."""
    made, memory = writer.empty(tensor.described)
    memory[:] = memory_of(np.ascontiguousarray(tensor.read()))
    return made


def scheduler_in(folder: Path) -> Mapping[str, Any] | None:
    """Returns the state of a scheduler, if a folder has one.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / SCHEDULER
    return plain(fleet_files.arrays(path), SCHEDULER) if path.is_file() else None


def write_rest(state: Checkpoint, folder: Path) -> None:
    """Writes the scheduler's state, and copies the other files of the source.

    Raises:
        OSError: A file cannot be written.
    """
    for file in state.files:
        shutil.copy2(file, folder)
    if state.scheduler is not None:
        fleet_files.save(folder / SCHEDULER, dict(state.scheduler))


def other_files(folder: Path, *patterns: str) -> tuple[Path, ...]:
    """Returns the files of a folder that match none of some patterns."""
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not any(path.match(pattern) for pattern in patterns)
    )
