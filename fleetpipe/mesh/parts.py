"""Describes which region of a full tensor a rank holds, for whoever saves, loads or compares it.

A full tensor is one of the single-device model. A part of it is what one rank holds, along pp or as
a shard along mp. The number of parts, and which process has which, depend on the ranks that train;
the full tensor does not. A process that has several parts of a tensor saves and restores them as
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.axes import SHARDS
from fleetpipe.mesh.groups import Group
from fleetpipe.transport.wire.structure import SIZES

#: What names a full tensor, such as its fully qualified name.
Name = TypeVar("Name", bound=Hashable)
#: Returns a process's coordinate along mp, and the number of ranks along mp.
ShardPosition = Callable[[], tuple[int, int]]


class Region(NamedTuple):
    """The region of a full tensor that a part covers: some indices along one axis of the tensor.

    Attributes:
        axis: The axis of the tensor along which it is split.
        start: The part's first index along the axis.
        stop: The index after the part's last one.
        size: Size of the full tensor along the axis.
    """

    axis: int
    start: int
    stop: int
    size: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the full tensor, given the part's ``shape``."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part, given the full tensor's ``shape``."""
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def is_of(self, value: Any) -> bool:
        """Returns whether a tensor or array has the full one's size along the axis."""
        shape = tuple(value.shape)
        return len(shape) > self.axis and shape[self.axis] == self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the part from the full tensor."""
        return (*[slice(None)] * self.axis, slice(self.start, self.stop))

    def taken_from(self, whole: Any) -> Any:
        """Returns the part of the full tensor or array ``whole``."""
        return whole[self.slices]


class Described(NamedTuple):
    """The dtype and shape of a full tensor.

    Attributes:
        dtype: Paddle's name of the dtype.
        shape: The shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        """Describes the tensor in words, for messages."""
        return f"{self.dtype} of shape {list(self.shape)}"


class LocalTensor(NamedTuple):
    """A full tensor, or the part of one that this rank holds.

    Attributes:
        tensor: A tensor of Paddle's, or an array, with the values.
        cut: The region of the full tensor that ``tensor`` covers; None if it is the full tensor.
        differs: Whether ranks that hold the same region may have other values, as replicas have
            other running statistics.
    """

    tensor: Tensor | np.ndarray
    cut: Region | None = None
    differs: bool = False

    @property
    def described(self) -> Described:
        """The full tensor's dtype and shape."""
        shape = tuple(map(int, self.tensor.shape))
        name = _dtype_name(self.tensor.dtype)
        return Described(name, shape if self.cut is None else self.cut.whole(shape))


@cache
def _dtype_name(dtype: Any) -> str:
    """Returns Paddle's name of a dtype; the cache spares each save many calls into Paddle."""
    if isinstance(dtype, np.dtype):
        # NumPy has no bfloat16: Paddle exports its bits as uint16.
        return "bfloat16" if dtype == np.uint16 else dtype.name
    return str(dtype).removeprefix("paddle.")


class PartOfWhole(NamedTuple):
    """Says which part of a full parameter a parameter is: its attribute ``part_of_whole``.

    A part along pp has a name of its own, and a process may have several. A part along one of
    :data:`SHARDS`, a shard, has the name of the full parameter.

    Attributes:
        number: The number of the part, from 0. Along pp, its layer's index is that of the first
            part's layer plus this number.
        cut: The region of the full parameter that the part covers.
        axis: The axis of the mesh along which ranks hold the parts.
    """

    number: int
    cut: Region
    axis: str = "pp"

    @property
    def is_shard(self) -> bool:
        """Whether it is a shard: each rank along the axis has a part of the same name."""
        return self.axis in SHARDS

    def whole_name(self, name: str) -> str:
        """Returns the fully qualified name of the full parameter, given the part's ``name``."""
        if self.is_shard:
            return name
        *path, attribute = name.split(".")
        if attribute == f"part{self.number}":
            return ".".join([*path, "weight"])
        # A layer of a list of layers, or of one layer that has all parts.
        stem = [str(int(path[0]) - self.number)] if len(path) == 1 else path[:-1]
        return ".".join([*stem, attribute])


class ModelParts(NamedTuple):
    """The tensors that a process holds of a model, for a checkpoint.

    Attributes:
        tensors: The parameters and buffers that this process holds, each once, by fully qualified
            name.
        shapes: The names and full shapes of the whole model's tensors, in its order.
        buffers: Buffers that no state dict has, by fully qualified name; a checkpoint may lack
            them.
        late: Buffers that a forward has registered after the model was built, by their names.
        root: The layer that has the late buffers at their names; they are added to it if a
            restored model lacks them.
        plain_names: The fully qualified name of each name of the plain model from which a list of
            layers was made, in its order; a tied weight may have several. Empty without a plain
            model.
        loss: A layer that has the loss functions in it, as ``loss.0``; None if none has a state.
        owns_loss: Whether this process computes the loss; if not, the state of its loss functions
            is not saved.
        adapters: The kind of adapters, if only they are saved of a model; they are matched by name
            alone.
    """

    tensors: Mapping[str, LocalTensor]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, LocalTensor] = MappingProxyType({})
    late: Mapping[str, LocalTensor] = MappingProxyType({})
    root: Layer | None = None
    plain_names: Mapping[str, str] = MappingProxyType({})
    loss: Layer | None = None
    owns_loss: bool = True
    adapters: str = ""


def attached_part(tensor: Tensor) -> PartOfWhole | None:
    """Returns a parameter's ``part_of_whole``; None without it, as on Paddle's own shards."""
    part: PartOfWhole | None = getattr(tensor, "part_of_whole", None)
    return part


def part_of(tensor: Tensor, mp_position: ShardPosition) -> PartOfWhole | None:
    """Returns which part of a full parameter a parameter is; None if it is full itself.

    Layers of Paddle and of libraries mark on a shard along mp the axis of the tensor that is split.

    Args:
        tensor: The parameter, or a buffer.
        mp_position: Returns this process's coordinate along mp, and the number of ranks there.
    """
    part, axis = attached_part(tensor), split_axis(tensor)
    if part is not None or axis is None:
        return part
    (number, count), size = mp_position(), int(tensor.shape[axis])
    cut = Region(axis % len(tensor.shape), number * size, (number + 1) * size, count * size)
    return PartOfWhole(number, cut, "mp") if count > 1 else None


def split_axis(tensor: Tensor) -> int | None:
    """Returns the axis of a parameter that Paddle's marks name as split; None for a full parameter.

    A library's layer may set ``is_distributed`` on a parameter that it did not split.
    """
    axis: int | None = getattr(tensor, "split_axis", None) if _is_distributed(tensor) else None
    return axis


def shard_axis(tensor: Tensor) -> str:
    """Returns the axis of the mesh along which ranks hold the other shards of a parameter.

    The result is "" for a parameter that is no shard.
    """
    part = attached_part(tensor)
    if part is not None and part.is_shard:
        return part.axis
    return "mp" if _is_distributed(tensor) else ""


def _is_distributed(tensor: Tensor) -> bool:
    """Returns whether Paddle's mark says that a parameter is a shard along mp."""
    return bool(getattr(tensor, "is_distributed", False))


def local_tensor_of(tensor: Tensor, mp_position: ShardPosition) -> LocalTensor:
    """Describes what this rank holds of a parameter or buffer.

    Args:
        tensor: The parameter or buffer.
        mp_position: Returns this process's coordinate along mp, and the number of ranks there.

    Raises:
        CheckpointError: It is a shard, and does not say along which axis it is split.
    """
    part = part_of(tensor, mp_position)
    _, mp_ranks = mp_position()
    if part is None and _is_distributed(tensor) and mp_ranks > 1:
        raise CheckpointError(
            "a parameter is distributed over the tensor-parallel ranks in a way that nobody knows",
            got=f"{tensor.name}: is_distributed, and no split_axis",
            fix="set its split_axis to the axis that is cut, or is_distributed=False if none is",
        )
    # Paddle's running statistics are parameters that need no gradient.
    return LocalTensor(tensor, part and part.cut, bool(tensor.stop_gradient))


def whole_name(name: str, tensor: Tensor) -> str:
    """Returns the full parameter's name; ``name`` is that of ``tensor``, which may be a part."""
    part = attached_part(tensor)
    return name if part is None else part.whole_name(name)


def split_into_parts(
    state: Mapping[str, Any], tensors: Mapping[str, Tensor], mp_position: ShardPosition
) -> dict[str, Any]:
    """Returns a state in which full tensors are replaced by the parts that a process holds.

    Args:
        state: Full tensors or arrays, or parts already, by name.
        tensors: The parameters of the process, by name.
        mp_position: Returns this process's coordinate along mp, and the number of ranks there.

    Returns:
        The state with each part under its own name; other values are unchanged.
    """
    split: dict[str, Any] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        part = part_of(tensor, mp_position)
        full_name = name if part is None else part.whole_name(name)
        if part is not None and full_name in state and part.cut.is_of(state[full_name]):
            split[name] = part.cut.taken_from(state[full_name])
            used.add(full_name)
    # The first part may have the name of the full parameter.
    return {**{name: value for name, value in state.items() if name not in used}, **split}


class JoinedParts(Generic[Name]):
    """The tensors that a process holds, with adjacent parts of one full tensor joined.

    Attributes:
        tensors: The tensors, by the full tensor's name; one that joins several parts is a copy.
    """

    def __init__(self, tensors: Iterable[tuple[Name, LocalTensor]]) -> None:
        """Stores each tensor with its full tensor's name; joins the parts of one name, in order."""
        parts: dict[Name, list[LocalTensor]] = {}
        for name, local in tensors:
            parts.setdefault(name, []).append(local)
        self.tensors = {name: _join(of_name) for name, of_name in parts.items()}
        #: Each joined tensor with its parts.
        several = {name: of_name for name, of_name in parts.items() if len(of_name) > 1}
        self._parts = [(self.tensors[name], of_name) for name, of_name in several.items()]

    def copy_to_parts(self) -> None:
        """Copies the values of the joined tensors into their parts."""
        for whole, parts in self._parts:
            for part in parts:
                target: Tensor = part.tensor
                value: Tensor = whole.tensor
                if part.cut is not None and whole.cut is not None:
                    begin = whole.cut.start
                    value = part.cut._replace(
                        start=part.cut.start - begin, stop=part.cut.stop - begin
                    ).taken_from(value)
                if part is not whole:
                    target.set_value(value)


def _join(parts: list[LocalTensor]) -> LocalTensor:
    """Returns one tensor with the values of some adjacent parts, in their order."""
    first, last = parts[0], parts[-1]
    if first.cut is None or last.cut is None or len(parts) == 1:
        # One number, such as the powers of Adam, is the same for all parts.
        return first
    from fleetpipe.paddle_api import paddle

    values = paddle.concat([_detach(part) for part in parts], first.cut.axis)
    return LocalTensor(values, first.cut._replace(stop=last.cut.stop), first.differs)


def joined_on_first(group: Group, parts: Iterable[tuple[Name, LocalTensor]]) -> dict[Name, Tensor]:
    """Joins all parts of full tensors on the first rank of a group. Collective.

    The ranks broadcast their parts in turn, so that a rank other than the first holds the parts of
    at most one rank besides its own.

    Args:
        group: The ranks that have all parts between them, each part on one rank.
        parts: The parts of this rank, by the names of the full tensors.

    Returns:
        Copies of the full tensors, by name, on the first rank; {} on the others.
    """
    from fleetpipe.paddle_api import paddle

    full_tensors: dict[Name, Tensor] = {}
    for source in range(group.ranks):
        sent = None
        if source == group.rank:
            # Copies: the tensors may change before they have left this process.
            sent = [
                (name, local.cut and tuple(local.cut), _detach(local).clone())
                for name, local in parts
            ]
        for name, cut, part in group.broadcast(sent, source):
            if group.rank == 0 and cut is None:
                full_tensors[name] = part
            elif group.rank == 0:
                region = Region(*cut)
                if name not in full_tensors:
                    shape = region.whole(tuple(part.shape))
                    full_tensors[name] = paddle.empty(list(shape), part.dtype)
                full_tensors[name][region.slices] = part
    return full_tensors


def _detach(local: LocalTensor) -> Tensor:
    """Returns the tensor without its history of operations."""
    tensor: Tensor = local.tensor
    return tensor.detach()
