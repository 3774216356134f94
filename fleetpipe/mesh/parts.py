"""Parts of a parameter: which region of a full tensor a rank holds, to save, load, clip or compare.

The number of parts, and which process has which, depend on the ranks that train; the full tensor
does not. A process that has several parts of a tensor saves and restores them as one.
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

Name = TypeVar("Name", bound=Hashable)
#: Returns a process's coordinate along an axis of the mesh, and the number of ranks there.
Place = Callable[[], tuple[int, int]]


class Region(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        axis: The axis that is cut.
        start: The first index along it.
        stop: The index after the last.
        size: Size of the full tensor along it.
    """

    axis: int
    start: int
    stop: int
    size: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the full tensor, given that of the part."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part, given that of the full tensor."""
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def is_of(self, value: Any) -> bool:
        """Whether a tensor or array has the size of the full tensor along the axis."""
        shape = tuple(value.shape)
        return len(shape) > self.axis and shape[self.axis] == self.size

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the part in the full tensor."""
        return (*[slice(None)] * self.axis, slice(self.start, self.stop))

    def taken_from(self, whole: Any) -> Any:
        """Returns the part of a full tensor or array."""
        return whole[self.slices]


class Described(NamedTuple):
    """A full tensor without its values: Paddle's name of the dtype, and the shape."""

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
        return f"{self.dtype} of shape {list(self.shape)}"


class LocalTensor(NamedTuple):
    """A tensor, or the part of one that this rank has.

    Attributes:
        tensor: A tensor of Paddle's, or an array.
        cut: The part of the full tensor that it is; None if it is the full tensor.
        differs: Whether other ranks may have other values, as running statistics of replicas do.
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
    """Returns Paddle's name of a dtype; the cache saves a save its many calls into Paddle."""
    if isinstance(dtype, np.dtype):
        # NumPy has no bfloat16: Paddle exports its bits as uint16.
        return "bfloat16" if dtype == np.uint16 else dtype.name
    return str(dtype).removeprefix("paddle.")


class PartOfWhole(NamedTuple):
    """Which part of a full parameter a parameter is: the value of its attribute ``part_of_whole``.

    A part along pp has a name of its own, and a process may have several. A part along one of
    :data:`SHARDS`, a shard, has the name of the full parameter.

    Attributes:
        number: The number of the part, from 0. Along pp, its layer's index is that of the first
            part's layer plus this number.
        cut: The region of the full parameter that it is.
        axis: The axis of the mesh along which ranks hold the parts.
    """

    number: int
    cut: Region
    axis: str = "pp"

    @property
    def is_shard(self) -> bool:
        """Whether every rank along the axis has a part of this name."""
        return self.axis in SHARDS

    def whole_name(self, name: str) -> str:
        """Returns the fully qualified name of the full parameter, given that of the part."""
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
        late: Buffers that a forward has registered after the model was built.
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


def part_of(tensor: Tensor, place: Place) -> PartOfWhole | None:
    """Returns which part of a full parameter a parameter is; None if it is full itself.

    Layers of Paddle and of libraries mark on a shard along mp which axis of the tensor is cut.

    Args:
        tensor: The parameter, or a buffer.
        place: Returns this process's coordinate along mp, and the number of ranks there.
    """
    part, axis = attached_part(tensor), split_axis(tensor)
    if part is not None or axis is None:
        return part
    (number, count), size = place(), int(tensor.shape[axis])
    cut = Region(axis % len(tensor.shape), number * size, (number + 1) * size, count * size)
    return PartOfWhole(number, cut, "mp") if count > 1 else None


def split_axis(tensor: Tensor) -> int | None:
    """Returns the axis along which Paddle's marks say that a parameter is cut; None for a full one.

    A library's layer may set ``is_distributed`` on a parameter that it did not cut.
    """
    axis: int | None = getattr(tensor, "split_axis", None) if _is_distributed(tensor) else None
    return axis


def shard_axis(tensor: Tensor) -> str:
    """Returns the axis of the mesh along which ranks have other shards; "" for no shard."""
    part = attached_part(tensor)
    if part is not None and part.is_shard:
        return part.axis
    return "mp" if _is_distributed(tensor) else ""


def _is_distributed(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "is_distributed", False))


def local_tensor_of(tensor: Tensor, place: Place) -> LocalTensor:
    """Describes a parameter or buffer; the arguments are those of :func:`part_of`.

    Raises:
        CheckpointError: It is a shard, and does not say along which axis it is cut.
    """
    part = part_of(tensor, place)
    if part is None and _is_distributed(tensor) and place()[1] > 1:
        raise CheckpointError(
            "a parameter is distributed over the tensor-parallel ranks in a way that nobody knows",
            got=f"{tensor.name}: is_distributed, and no split_axis",
            fix="set its split_axis to the axis that is cut, or is_distributed=False if none is",
        )
    # Paddle's running statistics are parameters that need no gradient.
    return LocalTensor(tensor, part and part.cut, bool(tensor.stop_gradient))


def whole_name(name: str, tensor: Tensor) -> str:
    """Returns the fully qualified name of the full parameter that ``tensor`` is or is a part of."""
    part = attached_part(tensor)
    return name if part is None else part.whole_name(name)


def parted(state: Mapping[str, Any], tensors: Mapping[str, Tensor], place: Place) -> dict[str, Any]:
    """Returns a state in which full tensors are replaced by the parts that a process holds.

    Args:
        state: Tensors or arrays by name.
        tensors: By name, the parameters of the process.
        place: As for :func:`part_of`.
    """
    parts = {name: part for name, t in tensors.items() if (part := part_of(t, place)) is not None}
    wholes = {name: part.whole_name(name) for name, part in parts.items()}
    # The first part may have the name of the full parameter.
    split = {
        name: part.cut.taken_from(state[wholes[name]])
        for name, part in parts.items()
        if wholes[name] in state and part.cut.is_of(state[wholes[name]])
    }
    used = {wholes[name] for name in split}
    return {**{name: value for name, value in state.items() if name not in used}, **split}


class JoinedParts(Generic[Name]):
    """The tensors that a process holds, where parts of one tensor are joined.

    Attributes:
        tensors: The tensors, by name; one that is joined of several parts is a copy.
    """

    def __init__(self, tensors: Iterable[tuple[Name, LocalTensor]]) -> None:
        """Takes tensors, those of one name in the order of their parts."""
        parts: dict[Name, list[LocalTensor]] = {}
        for name, local in tensors:
            parts.setdefault(name, []).append(local)
        self.tensors = {name: _joined(ones) for name, ones in parts.items()}
        self._parts = [(self.tensors[name], ones) for name, ones in parts.items() if len(ones) > 1]

    def hand_out(self) -> None:
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


def _joined(parts: list[LocalTensor]) -> LocalTensor:
    first, last = parts[0], parts[-1]
    if first.cut is None or last.cut is None or len(parts) == 1:
        # One number, such as the powers of Adam, is the same for all parts.
        return first
    from fleetpipe.paddle_api import paddle

    values = paddle.concat([_detached(part) for part in parts], first.cut.axis)
    return LocalTensor(values, first.cut._replace(stop=last.cut.stop), first.differs)


def joined_on_first(group: Group, parts: Iterable[tuple[Name, LocalTensor]]) -> dict[Name, Tensor]:
    """Returns copies of full tensors on the first rank of a group, {} on the others. Collective.

    The ranks broadcast their parts in turn, so that a rank other than the first holds the parts of
    at most one rank besides its own.

    Args:
        group: The ranks that have all parts between them, each on one rank.
        parts: The parts of this rank, by the names of the full tensors.
    """
    from fleetpipe.paddle_api import paddle

    whole: dict[Name, Tensor] = {}
    for source in range(group.ranks):
        passed = None
        if source == group.rank:
            # Copies: what these are may change before they have left this process.
            passed = [
                (name, local.cut and tuple(local.cut), _detached(local).clone())
                for name, local in parts
            ]
        for name, cut, part in group.broadcast(passed, source):
            if group.rank == 0 and cut is None:
                whole[name] = part
            elif group.rank == 0:
                region = Region(*cut)
                if name not in whole:
                    shape = region.whole(tuple(part.shape))
                    whole[name] = paddle.empty(list(shape), part.dtype)
                whole[name][region.slices] = part
    return whole


def _detached(local: LocalTensor) -> Tensor:
    tensor: Tensor = local.tensor
    return tensor.detach()
