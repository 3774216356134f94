"""A capture as a value: the nodes of one run of a model's forward, and the values between.

A node is a call of a sublayer, or an operation outside of any (glue). Nodes stand in the order in
which they ran, which is the order of every later run. A value is a tensor of that run, by a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph import nest
from fleetpipe.paddle_api import paddle

#: Numbers a value.
ValueId = int


class Ref(NamedTuple):
    """A placeholder for a value in arguments."""

    value: ValueId


class Owned(NamedTuple):
    """A placeholder for a parameter or a buffer of the model in arguments.

    Attributes:
        layer: The layer that has it.
        name: Its name in that layer.
        path: Its name in the whole model.
    """

    layer: Layer
    name: str
    path: str


class Scope(NamedTuple):
    """One call of a layer: the layer's path in the model, and the number of the call.

    The model itself has the path "".
    """

    path: str
    call: int

    def __str__(self) -> str:
        return self.path + (f" (call {self.call + 1})" if self.call else "")


class Like(NamedTuple):
    """The shape of a tensor, and its dtype by name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The number of bytes of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * _SIZES.get(self.dtype, 4)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


_SIZES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "uint8": 1}
_SIZES.update(int8=1, complex64=8, complex128=16)


def like(tensor: Tensor) -> Like:
    """Returns shape and dtype of a tensor."""
    return Like(tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2])


class Mode(NamedTuple):
    """A layer with its mode, training or evaluation."""

    layer: Layer
    training: bool

    def put_back(self) -> None:
        """Sets the layer to this mode, without changing its sublayers."""
        self.layer.training = self.training


@dataclass(frozen=True)
class Node:
    """A call of a sublayer, or an operation outside of any.

    Attributes:
        function: The called layer or function of Paddle's.
        args: The arguments, nested, with :class:`Ref` and :class:`Owned` in place of tensors.
        named: The keyword arguments.
        outputs: The value of each tensor that it returns, in order.
        written: For each value that the node writes into, the number of the value afterwards.
        scopes: The calls of layers around it, from the model inwards; a sublayer's own call is the
            last.
        place: File and line of the user's code that called it.
        grad: Whether gradients were on.
        state: The names of the model's parameters and buffers that it has, takes, or uses through
            shared memory; one name for each tensor.
        modes: The layers in it, each with its mode.
        casts: Makes the context of automatic casts that the forward has opened around it; None if
            it has those of the batch.
    """

    function: Callable[..., Any]
    args: tuple[Nest, ...]
    named: dict[str, Nest]
    outputs: tuple[ValueId, ...]
    written: tuple[tuple[ValueId, ValueId], ...]
    scopes: tuple[Scope, ...]
    place: str
    grad: bool = True
    state: frozenset[str] = frozenset()
    modes: tuple[Mode, ...] = ()
    casts: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def is_layer(self) -> bool:
        """Whether it is a call of a sublayer."""
        return isinstance(self.function, paddle.nn.Layer)

    @property
    def name(self) -> str:
        """Its name in messages: the sublayer's path, or the layer around it and the operation."""
        if self.is_layer:
            return str(self.scopes[-1])
        inside = str(self.scopes[-1])
        name = str(getattr(self.function, "__name__", self.function)).strip("_")
        return f"{inside}: {name}" if inside else name

    @cached_property
    def uses(self) -> set[ValueId]:
        """The values that it takes as inputs."""
        return {leaf.value for leaf in arguments(self) if isinstance(leaf, Ref)}

    @property
    def makes(self) -> set[ValueId]:
        """The values that it returns, or creates by writing."""
        return {*self.outputs, *(new for _, new in self.written)}

    @property
    def owned(self) -> list[Owned]:
        """The parameters and buffers that it takes, as an operation."""
        return [leaf for leaf in arguments(self) if isinstance(leaf, Owned)]


def arguments(node: Node) -> Iterator[Nest]:
    """Yields the entries of the containers in a node's arguments."""
    return (leaf for _, leaf in parts((node.args, node.named)))


def parts(value: Nest, path: nest.Path = ()) -> Iterator[tuple[nest.Path, Nest]]:
    """Yields the entries of nested tuples, lists, dicts and slices, each with its path."""
    if isinstance(value, (Ref, Owned)):
        yield path, value
    elif isinstance(value, slice):
        yield from parts([value.start, value.stop, value.step], path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from parts(item, (*path, index))
    else:
        yield path, value


def map_parts(value: Nest, change: Callable[[Nest], Nest]) -> Nest:
    """Applies ``change`` to each part of nested arguments."""
    if isinstance(value, slice):
        return slice(*(map_parts(part, change) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: map_parts(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, (Ref, Owned)):
        return nest.rebuild(value, [map_parts(item, change) for item in value])
    return change(value)


@dataclass(frozen=True)
class Capture:
    """One run of a model's forward.

    Attributes:
        nodes: The nodes, in order.
        inputs: The model's inputs, nested, with :class:`Ref` in place of tensors.
        outputs: The model's outputs, in the same form.
        likes: Shape and dtype of each value.
        marks: The node before which each call of ``pipe_split`` came.
        changed: The parameters and buffers that it wrote into, by name.
        numbers: The buffers whose numbers Python has read, so that they must stay constant.
        switched: The layers that it switched between training and evaluation, as it left them.
        switched_at: File and line of the first such switch.
        unopened: Why a layer with sublayers is a node as a whole, by its path.
        draws: Whether it drew from generators of Python's or NumPy's, within nodes.
        left_out: Its other actions, which no stage repeats, with file and line.
        selected: The values whose sizes depend on numbers.
    """

    nodes: tuple[Node, ...]
    inputs: Nest
    outputs: Nest
    likes: tuple[Like, ...]
    marks: tuple[int, ...] = ()
    changed: Mapping[str, Owned] = field(default_factory=dict)
    numbers: tuple[Owned, ...] = ()
    switched: tuple[Mode, ...] = ()
    switched_at: str = ""
    unopened: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    draws: bool = False
    selected: frozenset[ValueId] = frozenset()

    @cached_property
    def input_values(self) -> list[ValueId]:
        """The values that are the model's inputs."""
        return refs_in(self.inputs)

    @cached_property
    def output_values(self) -> list[ValueId]:
        """The values that the model returns."""
        return refs_in(self.outputs)

    def maker(self, value: ValueId) -> int | None:
        """Returns the node that first creates a value; None for an input."""
        return self._makers.get(value)

    @cached_property
    def _makers(self) -> dict[ValueId, int | None]:
        makers: dict[ValueId, int | None] = {}
        for number in reversed(range(len(self.nodes))):
            makers.update(dict.fromkeys(self.nodes[number].makes, number))
        return {**makers, **dict.fromkeys(self.input_values)}

    @cached_property
    def calls(self) -> dict[Scope, tuple[int, int]]:
        """The first and the last node of each call of a layer."""
        ranges: dict[Scope, tuple[int, int]] = {}
        for number, node in enumerate(self.nodes):
            for scope in node.scopes:
                ranges[scope] = (ranges.get(scope, (number,))[0], number)
        return ranges

    @cached_property
    def alive(self) -> list[int]:
        """For each node, the bytes of earlier values that it or a later node uses."""
        last = dict.fromkeys(self.output_values, len(self.nodes))
        for number, node in reversed(list(enumerate(self.nodes))):
            for value in node.uses:
                last.setdefault(value, number)
        changes = [0] * (len(self.nodes) + 2)
        for value, end in last.items():
            maker = self.maker(value)
            changes[0 if maker is None else maker + 1] += self.likes[value].nbytes
            changes[end + 1] -= self.likes[value].nbytes
        return list(accumulate(changes))[: len(self.nodes)]


def refs_in(value: Nest) -> list[ValueId]:
    """Returns the values in nested arguments, in order."""
    return [leaf.value for _, leaf in parts(value) if isinstance(leaf, Ref)]
