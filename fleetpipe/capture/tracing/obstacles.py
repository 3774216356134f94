"""What a forward does that cannot be captured, and what it does with its model's state.

An ``Obstacle`` says what cannot be captured, why, and what to write instead. ``RunState`` tracks
which nodes of a run use and write the parameters and buffers of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.tracing.user_lines import forward_place
from fleetpipe.capture.tracing.value import Node, Owned
from fleetpipe.dygraph.batch.losses import kept_for
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import DATA_ENDS_TRAINING, Function, is_silent, set_data
from fleetpipe.paddle_api.layer import buffers_in, parameters_in
from fleetpipe.paddle_api.tensor import has_memory, shares_memory

IN_A_SUBLAYER = "put that code into a sublayer: what is within one may do anything"

_NONE: frozenset[str] = frozenset()


class Obstacle(NamedTuple):
    """Something in a forward that cannot be captured.

    Attributes:
        what: The action of the forward.
        cause: Why it cannot be captured.
        fix: What to write instead, if it is in the model's own forward.
    """

    what: str
    cause: str
    fix: str = IN_A_SUBLAYER


READS = Obstacle(
    "reads the numbers in a tensor",
    "which nodes run would depend on the numbers in a batch",
    f"{IN_A_SUBLAYER}; or, for the sizes of images in a small input of whole numbers, name that "
    "input in shape_inputs",
)
SIZE = Obstacle(
    "reads a size that depends on the numbers in a tensor",
    "how many a mask or nonzero() selects differs from batch to batch",
    "compute with paddle.shape(x) and paddle.numel(x), which are operations, or with a mask that "
    f"keeps the size; or {IN_A_SUBLAYER}",
)
DRAWS = Obstacle(
    "draws from a generator of Python's or NumPy's",
    "what it drew at the capture would stay, batch after batch",
    "draw by paddle.rand, paddle.randint or paddle.bernoulli and compute with the tensor; or "
    f"{IN_A_SUBLAYER}, and draws anew in each call",
)
BACKWARD = Obstacle(
    "computes gradients", "a stage's backward is its own: a node is no place for another"
)
MEMORY = Obstacle(
    "reaches for the memory of a tensor",
    "a stage repeats operations: it would not see what is read or written there",
    "write into a parameter or buffer by set_value or paddle.assign",
)
FOREIGN = Obstacle(
    "writes into a tensor that came from no operation of Paddle's",
    "each micro-batch would find there what the one before has left",
    "register_buffer what is kept from call to call; make what is not by paddle.zeros, full or "
    "assign",
)
UNKNOWN = Obstacle(
    "uses a tensor that came from no operation of Paddle's",
    "it is a parameter of a layer that is no sublayer, or something else than Paddle made it",
    f"make layers and parameters in __init__; or {IN_A_SUBLAYER}",
)


def keeps_tensor(name: str) -> Obstacle:
    """Returns the obstacle that a tensor becomes an attribute."""
    return Obstacle(
        f"keeps a tensor as {name!r}",
        "a stage repeats operations, and sets no attributes",
        f"return it, or write into a buffer by paddle.assign; or {IN_A_SUBLAYER}",
    )


def uses_attribute(path: str, name: str) -> Obstacle:
    """Returns the obstacle that code uses a tensor which is an attribute of another sublayer."""
    return Obstacle(
        f"uses a tensor that {path} keeps as {name!r}",
        f"{path} is one node, and a stage hands on what it returns",
        f"return it from {path} too, beside its output",
    )


def returns_number(name: str) -> Obstacle:
    """Returns the obstacle that a sublayer returns a number which depends on the batch."""
    return Obstacle(
        f"uses a number of Python's that {name} makes of those in a tensor, or of chance",
        "which nodes run, and with what, would depend on the numbers in a batch",
        f"return a tensor from {name}; or {IN_A_SUBLAYER}",
    )


def reads_state(name: str) -> Obstacle:
    """Returns the obstacle that Python computes with the numbers of a parameter or buffer."""
    return Obstacle(
        f"reads the numbers in {name!r}, which changes while the model trains",
        "what is computed from them in Python stays as it was at the capture",
        f"compute it by operations of Paddle's; or {IN_A_SUBLAYER}",
    )


def has_graph(name: str) -> Obstacle:
    """Returns the obstacle that a value which needs a gradient is written into a parameter."""
    return Obstacle(
        f"writes into the parameter {name!r} what needs a gradient",
        "the parameter would be trained no more: its gradient goes to what was written",
        "write under paddle.no_grad(), or what detach() returns",
    )


def outside_no_grad(name: str) -> Obstacle:
    """Returns the obstacle that code writes into a trained parameter while gradients are on."""
    return Obstacle(
        f"writes in place into the trained parameter {name!r}",
        "Paddle lets nobody do so while gradients are on",
        "write under paddle.no_grad(), or by set_value",
    )


def unseen(name: str) -> Obstacle:
    """Returns the obstacle that a parameter or buffer changes without an operation."""
    return Obstacle(
        f"changes {name!r} in a way that is no operation",
        "a stage repeats operations",
        f"write into it by set_value or paddle.assign; or {IN_A_SUBLAYER}",
    )


def require_nothing_kept(model: Layer, losses: Sequence[Any], before: Mapping[int, Tensor]) -> None:
    """Raises an error if a forward stores tensors for a loss, as auxiliary losses in a list."""
    kept = (path for loss in losses for path, tensor in kept_for(loss) if id(tensor) not in before)
    path = next(kept, None)
    if path is not None:
        raise CaptureError(
            f"the loss function reads a tensor that the forward of {type(model).__name__} keeps",
            where=forward_place(model),
            got=path,
            cause="it appends an auxiliary loss to a list, or keeps it in an attribute: stages "
            "repeat operations, and keep nothing",
            fix="return it from the forward, (output, kept), of which loss_fn gets both",
        )


def require_no_new_parameters(model: Layer, is_known: Callable[[Tensor], object]) -> None:
    """Raises an error if a forward creates parameters, as a layer built in its first call."""
    name = next((name for name, p in model.named_parameters() if not is_known(p)), None)
    if name is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} makes the parameter {name!r}",
            where=forward_place(model),
            cause="the stages and the optimizer have the parameters that there are before it runs",
            fix="make layers and parameters in __init__; or call the model with such inputs once, "
            "before fleetpipe.pipeline",
        )


class RunState:
    """The parameters and buffers of a model, while its forward runs once."""

    def __init__(self, model: Layer) -> None:
        self._owned: dict[int, Owned] = {}
        self._tensors: list[tuple[Tensor, int]] = []
        self._places: Counter[int] = Counter()
        self._of_layer: dict[int, frozenset[str]] = {}
        #: By the id of a view, the names of the parameters and buffers whose memory it shares.
        self._views: dict[int, frozenset[str]] = {}
        #: By the number of a node, the names of those that it uses through views.
        self._by_view: dict[int, frozenset[str]] = {}
        self._written: set[str] = set()
        self._written_by_view: set[str] = set()
        self._find(model)

    def _find(self, model: Layer) -> None:
        """Collects the parameters and buffers of a model."""
        for path, layer in model.named_sublayers(include_self=True):
            for name, tensor in _own_tensors(layer):
                whole = f"{path}.{name}" if path else name
                if id(tensor) not in self._owned:
                    self._tensors.append((tensor, tensor.inplace_version))
                self._owned.setdefault(id(tensor), Owned(layer, name, whole))
                self._places[id(tensor)] += 1
        for layer in model.sublayers(include_self=True):
            parts = layer.sublayers(include_self=True)
            names = {self._owned[id(t)].path for part in parts for _, t in _own_tensors(part)}
            self._of_layer[id(layer)] = frozenset(names)

    def get(self, tensor: Tensor) -> Owned | None:
        """Returns the placeholder of a parameter or buffer; None for another tensor."""
        return self._owned.get(id(tensor))

    def of(self, function: Function, tensors: Sequence[Tensor], number: int) -> frozenset[str]:
        """Returns the names of the parameters and buffers of a node and among its inputs.

        Args:
            function: The layer or function that the node calls.
            tensors: Its inputs.
            number: The number of the node.
        """
        names = set(self._of_layer.get(id(function), _NONE))
        names.update(self._owned[id(t)].path for t in tensors if id(t) in self._owned)
        by_view = frozenset().union(*(self._views.get(id(tensor), _NONE) for tensor in tensors))
        if by_view:
            self._by_view[number] = by_view
        return frozenset(names)

    def called(
        self,
        function: Function,
        tensors: Sequence[Tensor],
        made: Iterable[Tensor],
        written: Iterable[Tensor],
    ) -> None:
        """Records what a node has written, and which outputs share memory with the state."""
        for tensor in written:
            self._wrote(tensor)
        if is_silent(function):
            self._wrote(tensors[0])
        if isinstance(function, paddle.nn.Layer):
            return
        sources = [(tensor, self._names_of(tensor)) for tensor in tensors]
        sources = [(tensor, names) for tensor, names in sources if names and has_memory(tensor)]
        if function is set_data:
            # The buffer has the memory of the value from here on.
            self._views[id(tensors[1])] = self._names_of(tensors[0]) | self._names_of(tensors[1])
            return
        for output in made if sources else ():
            if id(output) in self._owned or not has_memory(output):
                continue
            for tensor, names in sources:
                if tensor is not output and shares_memory(output, tensor):
                    self._views[id(output)] = names.union(self._views.get(id(output), _NONE))

    def _wrote(self, tensor: Tensor) -> None:
        """Records a write into a tensor."""
        if id(tensor) in self._owned:
            self._written.add(self._owned[id(tensor)].path)
        names = self._views.get(id(tensor), _NONE)
        self._written |= names
        self._written_by_view |= names

    def heard(self, function: Function, args: tuple[object, ...]) -> None:
        """Records a write within a node by an operation that leaves the tensor's version."""
        if is_silent(function) and id(args[0]) in self._owned:
            self._wrote(args[0])

    def changed(self, ids: Collection[int]) -> dict[str, Owned]:
        """Returns the parameters and buffers that the run has written into, by name."""
        self._written.update(
            self._owned[id(tensor)].path
            for tensor, version in self._tensors
            if id(tensor) in ids or tensor.inplace_version != version
        )
        return {name: self.named(name) for name in sorted(self._written)}

    def named(self, name: str) -> Owned:
        """Returns the placeholder of the parameter or buffer with a name."""
        return next(owned for owned in self._owned.values() if owned.path == name)

    def through_views(self, nodes: Sequence[Node]) -> list[frozenset[str]]:
        """Returns each node's state, with the written state that it uses through views."""
        return [
            node.state | (self._by_view.get(number, _NONE) & self._written_by_view)
            for number, node in enumerate(nodes)
        ]

    def _names_of(self, tensor: Tensor) -> frozenset[str]:
        """Returns the names of the parameters and buffers whose memory a tensor has."""
        owned = self._owned.get(id(tensor))
        return self._views.get(id(tensor), _NONE) if owned is None else frozenset({owned.path})

    def refusal(self, target: Tensor, value: Tensor, stays: bool) -> Obstacle | None:
        """Returns why a tensor cannot replace a parameter or buffer; None if it can.

        Args:
            target: The parameter or buffer.
            value: The tensor that replaces it.
            stays: Whether the layers keep the object, which gets the memory of ``value``.
        """
        owned, other = self._owned.get(id(target)), self._owned.get(id(value))
        if owned is None:
            return None
        write = f"write into it: paddle.assign(value.detach(), self.{owned.name})"
        if other is not None and other != owned:
            return Obstacle(
                f"has {owned.path!r} be the same tensor as {other.path!r}",
                "a stage writes into the tensors that there are",
                f"assign a copy: self.{owned.name} = value.clone()",
            )
        if stays and not target.stop_gradient and DATA_ENDS_TRAINING:
            return Obstacle(
                f"sets .data of the parameter {owned.path!r}",
                "in this version of Paddle that is another tensor, which is not trained",
                f"write self.{owned.name}.set_value(value)",
            )
        if not stays and self._places[id(target)] > 1:
            return Obstacle(
                f"puts another tensor in the place of {owned.path!r}, which several layers have",
                "the others would keep the one that was there",
                write,
            )
        if list(target.shape) != list(value.shape) or target.dtype != value.dtype:
            return Obstacle(
                f"gives {owned.path!r} another shape or dtype",
                f"it was {list(target.shape)} of {target.dtype}, and becomes {list(value.shape)} "
                f"of {value.dtype}",
                "keep one shape and dtype, or put that code into a sublayer: what is within one "
                "may do anything",
            )
        return None


def _own_tensors(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers that a layer has itself, by name."""
    for name, tensor in [*parameters_in(layer).items(), *buffers_in(layer).items()]:
        if tensor is not None:
            yield name, tensor
