"""Runs a model's forward once and notes what it calls.

Where code in a layer does what no node can be made of (it reads a tensor's numbers, say), that
layer is not opened, and the forward runs again: as a whole it is called in Python like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.tracing._paddle import Function, intercepted
from fleetpipe.capture.tracing.mark import noting
from fleetpipe.capture.tracing.place import forward_place, is_users, user_place
from fleetpipe.capture.tracing.signature import PLAIN
from fleetpipe.capture.tracing.value import Like, Node, Owned, Ref, Trace, ValueId, like
from fleetpipe.capture.tracing.walk import NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph import has_memory, state_slots
from fleetpipe.dygraph.nest import leaves, tensors_of
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.errors import CaptureError

_IN_A_SUBLAYER = "put that code into a sublayer: what is within one may do anything"


class _Obstacle(NamedTuple):
    """What no node can be made of.

    Attributes:
        what: What a forward does.
        cause: Why that is no node.
        fix: What to do where it is in the model's own forward.
    """

    what: str
    cause: str
    fix: str = _IN_A_SUBLAYER


_READS = _Obstacle(
    "reads the numbers in a tensor", "which nodes run would depend on the numbers in a batch"
)
_BACKWARD = _Obstacle(
    "computes gradients", "a stage's backward is its own: a node is no place for another"
)
_UNKNOWN = _Obstacle(
    "uses a tensor that came from no operation of Paddle's",
    "it is a parameter of a layer that is no sublayer, or something else than Paddle made it",
    f"make layers and parameters in __init__; or {_IN_A_SUBLAYER}",
)


def _kept(name: str) -> _Obstacle:
    return _Obstacle(
        f"keeps a tensor as {name!r}",
        "a stage repeats operations, and sets no attributes",
        f"return it, or write into a buffer by paddle.assign; or {_IN_A_SUBLAYER}",
    )


class _NotTraceable(BaseException):
    """Code that no node can be made of; no error, so that no user's ``except`` catches it."""

    def __init__(self, layer: Layer, obstacle: _Obstacle, place: str) -> None:
        super().__init__(obstacle.what)
        self.layer, self.obstacle, self.place = layer, obstacle, place


def traced(model: Layer, inputs: Nest, unopened: Unopened) -> Trace:
    """Runs a model's forward once and returns what it called.

    Buffers and random states are put back.

    Args:
        model: Any layer. It runs in the mode that it is in.
        inputs: One argument; several in a tuple; by name in a dict.
        unopened: Which layers are nodes as a whole; classes are added that could not be opened.

    Raises:
        CaptureError: The model's own forward does what no node can be made of.
    """
    while True:
        try:
            with state_kept(model) as changed:
                trace = _Tracer(model, unopened).run(inputs)
            return replace(trace, changed=frozenset(changed))
        except _NotTraceable as failure:
            if failure.layer is model:
                raise CaptureError(
                    f"the forward of {type(model).__name__} {failure.obstacle.what}",
                    where=failure.place,
                    cause=failure.obstacle.cause,
                    fix=failure.obstacle.fix,
                ) from None
            reason = f"its forward {failure.obstacle.what}, {failure.place}"
            unopened.add(type(failure.layer), reason)


class _Tracer(Walk):
    """One run, noted."""

    def __init__(self, model: Layer, unopened: Unopened) -> None:
        super().__init__(model, unopened)
        self._owned = dict(_owned_by(model))
        self._nodes: list[Node] = []
        self._values: dict[int, ValueId] = {}
        #: Every tensor that has a number, so that no other gets its id.
        self._tensors: list[Tensor] = []
        self._likes: list[Like] = []
        self._marks: list[int] = []
        #: Why layers with sublayers are nodes.
        self._whole: dict[str, str] = {}
        #: What is no operation and no read, each once.
        self._left_out: dict[str, None] = {}
        #: How much is in the lists and dicts of each opened layer.
        self._sizes: list[dict[str, int]] = []

    def run(self, inputs: Nest) -> Trace:
        """Runs the forward."""
        args, named = arguments_of(inputs)
        for tensor in tensors_of(inputs):
            self._number(tensor)
        noted = self._noted(inputs)
        with intercepted(self), noting(self.mark):
            output = self._model(*args, **named)
        _require_tensors(self._model, output)
        return Trace(
            tuple(self._nodes),
            noted,
            self._noted(output),
            tuple(self._likes),
            tuple(self._marks),
            unopened=self._whole,
            left_out=tuple(self._left_out),
        )

    def mark(self) -> None:
        """Notes that a stage begins.

        Raises:
            CaptureError: It would begin within a node.
        """
        if self._inside:
            raise CaptureError(
                "pipe_split() is called in a sublayer that is a node as a whole",
                where=user_place(),
                cause="it has no sublayers, is of Paddle's, in no_split, or does what no node can "
                "be made of",
                fix="call pipe_split between sublayers, in the forward of a layer that has some",
            )
        self._marks.append(len(self._nodes))

    def entered(self, layer: Layer) -> None:
        """Looks at what the layer keeps."""
        self._sizes.append(_sizes(layer))

    def left(self, output: Nest) -> None:
        """Makes sure that what an opened layer returns came from nodes."""
        self._noted(output)
        layer, before = self._opened[-1], self._sizes.pop()
        for name, size in _sizes(layer).items():
            if size != before.get(name, size):
                self._left_out.setdefault(f"it changes {name!r}, {forward_place(layer)}")

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls the function, and notes that it is not recomputed."""
        if not self._inside:
            self._left_out.setdefault(
                f"it recomputes, {user_place()}; pass recompute_interval to fleetpipe.pipeline"
            )
        return super().recompute(call, function, args)

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Refuses to make numbers of a value."""
        if not self._inside and id(args[0]) in self._values:
            raise self._failure(_READS)
        return super().read(function, args, named)

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Refuses to compute gradients."""
        if not self._inside:
            raise self._failure(_BACKWARD)
        return super().backward(function, args, named)

    def assigned(self, name: str, value: Any) -> None:
        """Refuses that a tensor is kept, and notes what else is."""
        # 0 is this function, 1 what stands for Layer.__setattr__, 2 what sets the attribute.
        if self._inside or not is_users(sys._getframe(2)):
            return
        if isinstance(value, paddle.Tensor):
            raise self._failure(_kept(name))
        self._left_out.setdefault(f"it sets {name!r}, {user_place()}")

    def node(self, call: NodeCall) -> Any:
        """Notes what a call takes and makes."""
        args, named = self._noted(call.args), self._noted(call.named)
        layer: Layer = call.function
        if isinstance(layer, paddle.nn.Layer) and layer._sub_layers:
            self._whole[call.scopes[-1].path] = self._unopened.reason(layer) or "it has hooks"
        given = list(tensors_of((call.args, call.named)))
        versions = [tensor.inplace_version for tensor in given]
        with lent(_state_of(call.function, given)):
            output = call.do()
        changed = {
            id(tensor): tensor
            for tensor, version in zip(given, versions)
            if tensor.inplace_version != version
        }
        known = self._values
        written = [(known[key], self._number(changed[key])) for key in changed if key in known]
        outputs = [
            known[id(tensor)] if id(tensor) in known else self._number(tensor)
            for tensor in tensors_of(output)
        ]
        self._nodes.append(
            Node(
                call.function,
                args,
                named,
                tuple(outputs),
                tuple(written),
                call.scopes,
                user_place(),
                paddle.is_grad_enabled(),
            )
        )
        return output

    def _number(self, tensor: Tensor) -> ValueId:
        """Gives a tensor a number; another one if it has one."""
        self._values[id(tensor)] = number = len(self._tensors)
        self._tensors.append(tensor)
        self._likes.append(like(tensor))
        return number

    def _noted(self, value: Nest) -> Nest:
        """Returns ``value`` with what stands for its tensors.

        Raises:
            _NotTraceable: One came from no node.
        """
        if isinstance(value, paddle.Tensor):
            return self._stand_in(value)
        if isinstance(value, (tuple, list)):
            items = [self._noted(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._noted(item) for key, item in value.items()}
        return value

    def _stand_in(self, tensor: Tensor) -> Nest:
        number = self._values.get(id(tensor))
        if number is not None:
            return Ref(number)
        owned = self._owned.get(id(tensor))
        if owned is not None:
            return owned
        if not tensor.stop_gradient:
            raise self._failure(_UNKNOWN)
        return tensor

    def _failure(self, obstacle: _Obstacle) -> _NotTraceable:
        return _NotTraceable(self._opened[-1], obstacle, user_place())


def _sizes(layer: Layer) -> dict[str, int]:
    """Returns how much is in the lists, dicts and sets that a layer has as attributes."""
    return {
        name: len(value)
        for name, value in vars(layer).items()
        if isinstance(value, (list, dict, set)) and name not in ("_parameters", "_buffers")
    }


def _require_tensors(model: Layer, output: Nest) -> None:
    """Refuses what a model returns where no stage could give it back.

    Raises:
        CaptureError: It has no tensor, or something that is neither a tensor nor a plain value.
    """
    strange = [
        type(leaf).__qualname__
        for _, leaf in leaves(output)
        if not isinstance(leaf, (paddle.Tensor, *PLAIN))
    ]
    if strange or not any(True for _ in tensors_of(output)):
        raise CaptureError(
            f"the forward of {type(model).__name__} returns what is no tensor",
            where=forward_place(model),
            expected="tensors, in tuples, lists and dicts, plain values among them",
            got=", ".join(dict.fromkeys(strange)) or repr(output),
            fix="return the tensors themselves; what is made of them, the loss function may make",
        )


def _state_of(function: Function, given: list[Tensor]) -> list[Tensor]:
    """Returns the parameters and buffers that a node has, and what tensors it takes."""
    if isinstance(function, paddle.nn.Layer):
        given = [*given, *function.state_dict().values()]
    return given


def _owned_by(model: Layer) -> Iterator[tuple[int, Owned]]:
    """Yields the parameters and buffers of a model by their ids."""
    found: dict[int, Owned] = {}
    for path, layer in model.named_sublayers(include_self=True):
        for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
            if tensor is not None:
                whole = f"{path}.{name}" if path else name
                found.setdefault(id(tensor), Owned(layer, name, whole))
    yield from found.items()


@contextmanager
def state_kept(model: Layer) -> Iterator[set[int]]:
    """Puts buffers and random states back in the end, and tells the ids of those that changed."""
    changed: set[int] = set()
    kept = [
        (holder, name, holder[name], holder[name].clone())
        for layer in model.sublayers(include_self=True)
        for holder, name in state_slots(layer)
        if has_memory(holder[name])
    ]
    with random_states_kept():
        try:
            yield changed
        finally:
            for holder, name, tensor, value in kept:
                # equal_all of 2.6.2 takes small numbers for zeros.
                if (
                    holder[name] is not tensor
                    or tensor.numpy().tobytes() != value.numpy().tobytes()
                ):
                    changed.add(id(tensor))
                    tensor.set_value(value)
                    holder[name] = tensor
