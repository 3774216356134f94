"""Runs a model's forward once and notes what it calls.

Where code in a layer does what no node can be made of (it reads a tensor's numbers, say), that
layer is not opened, and the forward runs again: as a whole it is called in Python like any other.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.tracing._paddle import Function, intercepted
from fleetpipe.capture.tracing.mark import noting
from fleetpipe.capture.tracing.value import Like, Node, Owned, Ref, Trace, ValueId, like
from fleetpipe.capture.tracing.walk import NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph import has_memory, state_slots
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.errors import CaptureError

#: Packages whose frames are not the user's; the last wraps functions of Paddle 2.6.2.
_NOT_THE_USERS = ("paddle", "fleetpipe", "decorator")
#: Models that Paddle brings are like a user's.
_MODELS = "paddle.vision.models."


class _NotTraceable(BaseException):
    """Code that no node can be made of; no error, so that no user's ``except`` catches it."""

    def __init__(self, layer: Layer, what: str, place: str) -> None:
        super().__init__(what)
        self.layer, self.what, self.place = layer, what, place


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
                    f"the forward of {type(model).__name__} {failure.what}",
                    where=failure.place,
                    cause="which nodes run would depend on the numbers in a batch",
                    fix="put that code into a sublayer: what is within one may do anything",
                ) from None
            unopened.add(type(failure.layer), f"its forward {failure.what}, {failure.place}")


def user_place() -> str:
    """Returns file and line of the innermost frame that is neither Paddle's nor of this package."""
    for frame, line in traceback.walk_stack(None):
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_MODELS) or name.partition(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


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

    def run(self, inputs: Nest) -> Trace:
        """Runs the forward."""
        args, named = arguments_of(inputs)
        for tensor in tensors_of(inputs):
            self._number(tensor)
        noted = self._noted(inputs)
        with intercepted(self), noting(self.mark):
            output = self._model(*args, **named)
        return Trace(
            tuple(self._nodes),
            noted,
            self._noted(output),
            tuple(self._likes),
            tuple(self._marks),
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

    def left(self, output: Nest) -> None:
        """Makes sure that what an opened layer returns came from nodes."""
        self._noted(output)

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Refuses to make numbers of a value."""
        if not self._inside and id(args[0]) in self._values:
            raise self._failure("reads the numbers in a tensor")
        return super().read(function, args, named)

    def node(self, call: NodeCall) -> Any:
        """Notes what a call takes and makes."""
        args, named = self._noted(call.args), self._noted(call.named)
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
            raise self._failure("uses a tensor that came from no operation of Paddle's")
        return tensor

    def _failure(self, what: str) -> _NotTraceable:
        return _NotTraceable(self._opened[-1], what, user_place())


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
