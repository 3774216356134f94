"""Describes what cannot be captured in a forward, and tracks which of its model's state it writes.

An ``Obstacle`` says what cannot be captured, why, and what to write instead. ``RunState`` tracks
which nodes of a run use and write the parameters and buffers of a model. These are the model's
state; the names of a state are the names of parameters and buffers in the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.tracing.user_lines import forward_location
from fleetpipe.capture.tracing.value import Node, StateRef
from fleetpipe.dygraph.batch.losses import tensors_read_by
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import DATA_ENDS_TRAINING, Function, is_silent, set_data
from fleetpipe.paddle_api.layer import buffers_in, parameters_in
from fleetpipe.paddle_api.tensor import has_memory, shares_memory

IN_A_SUBLAYER = "put that code into a sublayer: what is within one may do anything"

_NO_NAMES: frozenset[str] = frozenset()


class Obstacle(NamedTuple):
    """An action of a forward that cannot be captured.

    Attributes:
        action: The action, as a phrase that follows "the forward of X".
        cause: Why it cannot be captured.
        fix: What to write instead, if the action is in the model's own forward.
    """

    action: str
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
    """Returns the obstacle that a forward stores a tensor as the attribute ``name``."""
    return Obstacle(
        f"keeps a tensor as {name!r}",
        "a stage repeats operations, and sets no attributes",
        f"return it, or write into a buffer by paddle.assign; or {IN_A_SUBLAYER}",
    )


def uses_attribute(path: str, name: str) -> Obstacle:
    """Returns the obstacle that code uses a tensor that the layer ``path`` stores as ``name``."""
    return Obstacle(
        f"uses a tensor that {path} keeps as {name!r}",
        f"{path} is one node, and a stage hands on what it returns",
        f"return it from {path} too, beside its output",
    )


def returns_number(name: str) -> Obstacle:
    """Returns the obstacle that the node ``name`` returns a number that depends on the batch."""
    return Obstacle(
        f"uses a number of Python's that {name} makes of those in a tensor, or of chance",
        "which nodes run, and with what, would depend on the numbers in a batch",
        f"return a tensor from {name}; or {IN_A_SUBLAYER}",
    )


def reads_state(name: str) -> Obstacle:
    """Returns the obstacle that Python reads the numbers of the parameter or buffer ``name``."""
    return Obstacle(
        f"reads the numbers in {name!r}, which changes while the model trains",
        "what is computed from them in Python stays as it was at the capture",
        f"compute it by operations of Paddle's; or {IN_A_SUBLAYER}",
    )


def writes_gradient_value(name: str) -> Obstacle:
    """Returns the obstacle that a value with a gradient is written into the parameter ``name``."""
    return Obstacle(
        f"writes into the parameter {name!r} what needs a gradient",
        "the parameter would be trained no more: its gradient goes to what was written",
        "write under paddle.no_grad(), or what detach() returns",
    )


def outside_no_grad(name: str) -> Obstacle:
    """Returns the obstacle that code writes into the parameter ``name`` while gradients are on."""
    return Obstacle(
        f"writes in place into the trained parameter {name!r}",
        "Paddle lets nobody do so while gradients are on",
        "write under paddle.no_grad(), or by set_value",
    )


def changes_unseen(name: str) -> Obstacle:
    """Returns the obstacle that the parameter or buffer ``name`` changes without an operation."""
    return Obstacle(
        f"changes {name!r} in a way that is no operation",
        "a stage repeats operations",
        f"write into it by set_value or paddle.assign; or {IN_A_SUBLAYER}",
    )


def require_no_tensor_kept_for_loss(
    model: Layer, losses: Sequence[Any], before: Mapping[int, Tensor]
) -> None:
    """Raises an error if a forward stored a tensor for a loss, such as an auxiliary loss.

    Args:
        model: The model.
        losses: The loss functions.
        before: By id, the tensors that the loss functions could reach before the forward.

    Raises:
        CaptureError: A loss function reaches another tensor now.
    """
    read = (pair for loss in losses for pair in tensors_read_by(loss))
    new = (path for path, tensor in read if id(tensor) not in before)
    path = next(new, None)
    if path is not None:
        raise CaptureError(
            f"the loss function reads a tensor that the forward of {type(model).__name__} keeps",
            where=forward_location(model),
            got=path,
            cause="it appends an auxiliary loss to a list, or keeps it in an attribute: stages "
            "repeat operations, and keep nothing",
            fix="return it from the forward, (output, kept), of which loss_fn gets both",
        )


def require_no_new_parameters(model: Layer, is_known: Callable[[Tensor], object]) -> None:
    """Raises an error if a forward created parameters, such as by building a layer.

    Args:
        model: The model, after its forward.
        is_known: Returns a true value for a parameter that existed before the forward.

    Raises:
        CaptureError: A parameter of the model is new.
    """
    name = next((name for name, p in model.named_parameters() if not is_known(p)), None)
    if name is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} makes the parameter {name!r}",
            where=forward_location(model),
            cause="the stages and the optimizer have the parameters that there are before it runs",
            fix="make layers and parameters in __init__; or call the model with such inputs once, "
            "before fleetpipe.pipeline",
        )


class RunState:
    """Tracks the use of a model's parameters and buffers while its forward runs once.

    ``_Tracer`` calls it for each node: :meth:`names_used_by` before the call and
    :meth:`record_call` after it.
    """

    def __init__(self, model: Layer) -> None:
        #: By id, the placeholder of each parameter and buffer.
        self._refs: dict[int, StateRef] = {}
        #: Each parameter and buffer with its version before the run.
        self._versions: list[tuple[Tensor, int]] = []
        #: By id, the number of layers that have a parameter or buffer as an attribute.
        self._layer_counts: Counter[int] = Counter()
        #: By the id of a layer, the names of its parameters and buffers, sublayers included.
        self._names_in_layer: dict[int, frozenset[str]] = {}
        #: By the id of a view, the names of the parameters and buffers whose memory it shares.
        self._views: dict[int, frozenset[str]] = {}
        #: By the number of a node, the names of the parameters and buffers it uses through views.
        self._used_by_view: dict[int, frozenset[str]] = {}
        self._written: set[str] = set()
        self._written_by_view: set[str] = set()
        self._collect(model)

    def _collect(self, model: Layer) -> None:
        """Collects the parameters and buffers of a model, and those of each of its layers."""
        for path, layer in model.named_sublayers(include_self=True):
            for name, tensor in _direct_tensors(layer):
                full_name = f"{path}.{name}" if path else name
                if id(tensor) not in self._refs:
                    self._versions.append((tensor, tensor.inplace_version))
                self._refs.setdefault(id(tensor), StateRef(layer, name, full_name))
                self._layer_counts[id(tensor)] += 1
        for layer in model.sublayers(include_self=True):
            inner_layers = layer.sublayers(include_self=True)
            tensors = [tensor for inner in inner_layers for _, tensor in _direct_tensors(inner)]
            names = frozenset(self._refs[id(tensor)].path for tensor in tensors)
            self._names_in_layer[id(layer)] = names

    def ref_of(self, tensor: Tensor) -> StateRef | None:
        """Returns the placeholder of a parameter or buffer; None for another tensor."""
        return self._refs.get(id(tensor))

    def names_used_by(
        self, function: Function, tensors: Sequence[Tensor], number: int
    ) -> frozenset[str]:
        """Returns the names of the parameters and buffers that a node is about to use.

        These are the tensors of the node's layer, and those among its inputs. Uses through views
        are recorded.

        Args:
            function: The layer or function that the node calls.
            tensors: Its inputs.
            number: The number of the node.
        """
        names = set(self._names_in_layer.get(id(function), _NO_NAMES))
        names.update(self._refs[id(t)].path for t in tensors if id(t) in self._refs)
        by_view = frozenset().union(*(self._views.get(id(t), _NO_NAMES) for t in tensors))
        if by_view:
            self._used_by_view[number] = by_view
        return frozenset(names)

    def record_call(
        self,
        function: Function,
        tensors: Sequence[Tensor],
        outputs: Iterable[Tensor],
        written: Iterable[Tensor],
    ) -> None:
        """Records what a node has written, and which outputs share memory with the state.

        Args:
            function: The layer or function that the node called.
            tensors: Its inputs.
            outputs: Its outputs.
            written: The inputs that it has written into.
        """
        for tensor in written:
            self._record_write(tensor)
        if is_silent(function):
            self._record_write(tensors[0])
        if isinstance(function, paddle.nn.Layer):
            return
        sources = [(tensor, self._names_sharing_memory(tensor)) for tensor in tensors]
        sources = [(tensor, names) for tensor, names in sources if names and has_memory(tensor)]
        if function is set_data:
            # The buffer has the memory of the value from here on.
            buffer, value = tensors[:2]
            shared = self._names_sharing_memory(buffer) | self._names_sharing_memory(value)
            self._views[id(value)] = shared
            return
        for output in outputs if sources else ():
            if id(output) in self._refs or not has_memory(output):
                continue
            for tensor, names in sources:
                if tensor is not output and shares_memory(output, tensor):
                    self._views[id(output)] = names.union(self._views.get(id(output), _NO_NAMES))

    def _record_write(self, tensor: Tensor) -> None:
        """Records a write into a tensor, and so into all state whose memory it shares."""
        if id(tensor) in self._refs:
            self._written.add(self._refs[id(tensor)].path)
        names = self._views.get(id(tensor), _NO_NAMES)
        self._written |= names
        self._written_by_view |= names

    def record_inner_write(self, function: Function, args: tuple[object, ...]) -> None:
        """Records that an operation inside of a node writes into a parameter or buffer.

        Only operations that leave the tensor's version unchanged have to be recorded so.
        """
        if is_silent(function) and id(args[0]) in self._refs:
            self._record_write(args[0])

    def written_state(self, ids: Collection[int]) -> dict[str, StateRef]:
        """Returns the parameters and buffers that the run has written into, by name.

        Args:
            ids: The ids of tensors that are known to have changed.
        """
        self._written.update(
            self._refs[id(tensor)].path
            for tensor, version in self._versions
            if id(tensor) in ids or tensor.inplace_version != version
        )
        return {name: self.ref_named(name) for name in sorted(self._written)}

    def ref_named(self, name: str) -> StateRef:
        """Returns the placeholder of the parameter or buffer with a name in the whole model."""
        return next(ref for ref in self._refs.values() if ref.path == name)

    def states_with_views(self, nodes: Sequence[Node]) -> list[frozenset[str]]:
        """Returns each node's ``state``, with the names of written state that it uses by views."""
        return [
            node.state | (self._used_by_view.get(number, _NO_NAMES) & self._written_by_view)
            for number, node in enumerate(nodes)
        ]

    def _names_sharing_memory(self, tensor: Tensor) -> frozenset[str]:
        """Returns the names of the parameters and buffers whose memory a tensor has."""
        ref = self._refs.get(id(tensor))
        return self._views.get(id(tensor), _NO_NAMES) if ref is None else frozenset({ref.path})

    def replacement_obstacle(self, target: Tensor, value: Tensor, stays: bool) -> Obstacle | None:
        """Returns why a tensor cannot replace a parameter or buffer; None if it can.

        Args:
            target: The parameter or buffer; for any other tensor the result is None.
            value: The tensor that replaces it.
            stays: Whether the layers keep the object ``target``, which gets the memory of
                ``value``; otherwise they have the object ``value`` afterwards.
        """
        ref, ref_of_value = self._refs.get(id(target)), self._refs.get(id(value))
        if ref is None:
            return None
        if ref_of_value is not None and ref_of_value != ref:
            return Obstacle(
                f"has {ref.path!r} be the same tensor as {ref_of_value.path!r}",
                "a stage writes into the tensors that there are",
                f"assign a copy: self.{ref.name} = value.clone()",
            )
        if stays and not target.stop_gradient and DATA_ENDS_TRAINING:
            return Obstacle(
                f"sets .data of the parameter {ref.path!r}",
                "in this version of Paddle that is another tensor, which is not trained",
                f"write self.{ref.name}.set_value(value)",
            )
        if not stays and self._layer_counts[id(target)] > 1:
            return Obstacle(
                f"puts another tensor in the place of {ref.path!r}, which several layers have",
                "the others would keep the one that was there",
                f"write into it: paddle.assign(value.detach(), self.{ref.name})",
            )
        if list(target.shape) != list(value.shape) or target.dtype != value.dtype:
            return Obstacle(
                f"gives {ref.path!r} another shape or dtype",
                f"it was {list(target.shape)} of {target.dtype}, and becomes {list(value.shape)} "
                f"of {value.dtype}",
                "keep one shape and dtype, or put that code into a sublayer: what is within one "
                "may do anything",
            )
        return None


def _direct_tensors(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers that a layer itself has, with their names in the layer."""
    for name, tensor in [*parameters_in(layer).items(), *buffers_in(layer).items()]:
        if tensor is not None:
            yield name, tensor
