"""Runs a model's forward once and notes what it calls.

Where code in a layer does what no node can be made of (it reads a tensor's numbers, say), that
layer is not opened, and the forward runs again: as a whole it is called in Python like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.tracing._paddle import (
    Function,
    intercepted,
    is_silent,
    noticed,
    set_data,
    target_of,
)
from fleetpipe.capture.tracing.kept import state_kept
from fleetpipe.capture.tracing.mark import noting
from fleetpipe.capture.tracing.place import forward_place, is_users, user_place
from fleetpipe.capture.tracing.signature import PLAIN
from fleetpipe.capture.tracing.state import RunState
from fleetpipe.capture.tracing.value import Like, Mode, Node, Ref, Trace, ValueId, like
from fleetpipe.capture.tracing.walk import NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph.nest import leaves, tensors_of
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
_MEMORY = _Obstacle(
    "reaches for the memory of a tensor",
    "a stage repeats operations: it would not see what is read or written there",
    "write into a parameter or buffer by set_value or paddle.assign",
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


def _reads_state(name: str) -> _Obstacle:
    return _Obstacle(
        f"reads the numbers in {name!r}, which changes while the model trains",
        "what is computed from them in Python stays as it was at the capture",
        f"compute it by operations of Paddle's; or {_IN_A_SUBLAYER}",
    )


def _has_graph(name: str) -> _Obstacle:
    return _Obstacle(
        f"writes into the parameter {name!r} what needs a gradient",
        "the parameter would be trained no more: its gradient goes to what was written",
        "write under paddle.no_grad(), or what detach() returns",
    )


def _unseen(name: str) -> _Obstacle:
    return _Obstacle(
        f"changes {name!r} in a way that is no operation",
        "a stage repeats operations",
        f"write into it by set_value or paddle.assign; or {_IN_A_SUBLAYER}",
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
                tracer = _Tracer(model, unopened)
                trace = tracer.run(inputs)
            return tracer.with_state(trace, changed)
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
        self._state = RunState(model)
        #: The layers that were switched between training and evaluation, and where.
        self._switched: dict[int, tuple[Layer, str]] = {}
        #: Where numbers of parameters and buffers are read, by name.
        self._numbers: dict[str, _NotTraceable] = {}
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
            switched=tuple(Mode(layer, layer.training) for layer, _ in self._switched.values()),
            switched_at=next((place for _, place in self._switched.values()), ""),
            unopened=self._whole,
            left_out=tuple(self._left_out),
        )

    def with_state(self, trace: Trace, ids: set[int]) -> Trace:
        """Returns the run, with what it wrote into.

        Args:
            trace: The run.
            ids: The parameters and buffers that were no more what they had been.

        Raises:
            _NotTraceable: What was written is read by Python, or no node has written it.
        """
        changed = self._state.changed(ids)
        self._unopened.written.update(changed)
        for name, failure in self._numbers.items():
            if name in self._unopened.written:
                raise failure
        states = self._state.through_views(trace.nodes)
        unseen = changed.keys() - frozenset().union(*states)
        for name in unseen:
            place = forward_place(self._model)
            raise _NotTraceable(self._model, _unseen(name), place or "?")
        nodes = (replace(node, state=state) for node, state in zip(trace.nodes, states))
        return replace(trace, nodes=tuple(nodes), changed=changed)

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
        if not self._inside:
            if id(args[0]) in self._values:
                raise self._failure(_READS)
            owned = self._state.get(args[0])
            if owned is not None:
                failure = self._failure(_reads_state(owned.path))
                if not args[0].stop_gradient:
                    raise failure
                self._numbers.setdefault(owned.path, failure)
        return super().read(function, args, named)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Refuses to give away the memory of a value, or of a parameter or buffer."""
        if not self._inside:
            users = is_users(sys._getframe(2))
            if function.__name__ == "get_tensor" and not users:
                # Paddle 2.6 makes numbers that way: int(x).
                return self.read(function, args, named)
            owned = any(self._state.get(arg) is not None for arg in args)
            # Paddle itself does so where it makes the first value of a parameter.
            if owned or (id(args[0]) in self._values and users):
                raise self._failure(_MEMORY)
        return super().memory(function, args, named)

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Notes an operation; within a node, what it writes into."""
        if self._inside:
            self._state.heard(function, args)
        return super().operation(function, args, named)

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Refuses to compute gradients."""
        if not self._inside:
            raise self._failure(_BACKWARD)
        return super().backward(function, args, named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """Refuses that a tensor is kept but in a buffer, and notes what else is."""
        if not self._inside:
            if name == "training" and id(layer) in self._paths and value != layer.training:
                self._switched.setdefault(id(layer), (layer, user_place()))
            buffer = vars(layer).get("_buffers", {}).get(name)
            # 0 is this function, 1 what stands for Layer.__setattr__, 2 what sets the attribute.
            if buffer is not None and value is not buffer:
                if not isinstance(value, paddle.Tensor):
                    what = f"takes the buffer {name!r} away"
                    raise self._failure(_kept(name)._replace(what=what))
            elif buffer is None and is_users(sys._getframe(2)):
                if isinstance(value, paddle.Tensor):
                    raise self._failure(_kept(name))
                self._left_out.setdefault(f"it sets {name!r}, {user_place()}")
        super().assigned(put, layer, name, value)

    def _require_place(self, target: Tensor, value: Tensor, stays: bool) -> None:
        """Refuses what cannot take the place of a parameter or buffer."""
        refusal = self._state.refusal(target, value, stays)
        if refusal is not None:
            raise self._failure(_Obstacle(*refusal))

    def node(self, call: NodeCall) -> Any:
        """Notes what a call takes and makes."""
        args, named = self._noted(call.args), self._noted(call.named)
        layer: Layer = call.function
        if isinstance(layer, paddle.nn.Layer) and layer._sub_layers:
            self._whole[call.scopes[-1].path] = self._unopened.reason(layer) or "it has hooks"
        given = list(tensors_of((call.args, call.named)))
        self._require_writable(call, given)
        state = self._state.of(layer, given, len(self._nodes))
        versions = [tensor.inplace_version for tensor in given]
        modes = _modes_in(layer)
        with lent(_state_of(call.function, given)):
            output = call.do()
        known, function = self._values, call.function
        if is_silent(function) and id(given[0]) in known:
            function = noticed(function)
            given[0]._bump_inplace_version()
        changed = {
            id(tensor): tensor
            for tensor, version in zip(given, versions)
            if tensor.inplace_version != version
        }
        made = list(tensors_of(output))
        self._state.called(function, given, made, [*changed.values()])
        written = [(known[key], self._number(changed[key])) for key in changed if key in known]
        outputs = [self._value_of(tensor, given) for tensor in made]
        self._nodes.append(
            Node(
                function,
                args,
                named,
                tuple(outputs),
                tuple(written),
                call.scopes,
                user_place(),
                paddle.is_grad_enabled(),
                state,
                modes,
            )
        )
        return output

    def _require_writable(self, call: NodeCall, given: Sequence[Tensor]) -> None:
        """Refuses what a stage cannot write into a parameter or buffer."""
        if call.function is set_data and len(given) > 1:
            self._require_place(given[0], given[1], call.call is set_data)
        target = target_of(call.function, call.args)
        if target is None or not paddle.is_grad_enabled():
            return
        owned = self._state.get(target)
        if owned is None or target.stop_gradient:
            return
        if any(not tensor.stop_gradient for tensor in given if tensor is not target):
            raise self._failure(_has_graph(owned.path))

    def _value_of(self, tensor: Tensor, given: Sequence[Tensor]) -> ValueId:
        """Returns the number of a tensor that a node returned."""
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        number = self._number(tensor)
        if self._state.get(tensor) is not None and any(tensor is one for one in given):
            # An operation that wrote into a buffer returns it: it is a buffer still.
            del self._values[id(tensor)]
        return number

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
        owned = self._state.get(tensor)
        if owned is not None:
            return owned
        if not tensor.stop_gradient:
            raise self._failure(_UNKNOWN)
        return tensor

    def _failure(self, obstacle: _Obstacle) -> _NotTraceable:
        return _NotTraceable(self._opened[-1], obstacle, user_place())


def _modes_in(function: Function) -> tuple[Mode, ...]:
    """Returns the modes of a layer that is a node, and of those in it."""
    if not isinstance(function, paddle.nn.Layer):
        return ()
    return tuple(Mode(part, part.training) for part in function.sublayers(include_self=True))


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
