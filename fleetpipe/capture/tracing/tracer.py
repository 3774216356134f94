"""Runs a model's forward once and records its calls: :func:`record`.

If code in a layer does something that cannot be captured, such as reading a tensor's numbers, the
forward runs again without opening that layer: it becomes a single node, called in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lent
from fleetpipe.capture.tracing import obstacles
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.obstacles import RunState
from fleetpipe.capture.tracing.signature import (
    PLAIN,
    Keys,
    Size,
    Sizes,
    tensors_in,
    whole,
    whole_at,
)
from fleetpipe.capture.tracing.user_lines import (
    Generators,
    RandomLines,
    asked_by_paddle,
    forward_place,
    noting,
    only_checked,
    only_raises,
    user_place,
)
from fleetpipe.capture.tracing.value import (
    Capture,
    Like,
    Mode,
    Node,
    NodeCall,
    Owned,
    Ref,
    Unopened,
    ValueId,
    Walk,
    arguments_of,
    at_makers,
    like,
    map_parts,
    parts,
)
from fleetpipe.dygraph.batch.losses import kept_for
from fleetpipe.dygraph.nest import leaves, map_tensors, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import Casts, automatic_casts, casts_of_now, casts_visible
from fleetpipe.paddle_api.eager_operations import (
    Function,
    intercepting,
    is_silent,
    raising_version,
    set_data,
    target_of,
)
from fleetpipe.paddle_api.layer import TABLES, buffers_in, sublayers_in
from fleetpipe.paddle_api.tensor import has_memory, note_write

#: The classes of numbers of Python and NumPy.
_NUMBERS = (bool, int, float, np.ndarray, np.generic)


class _Refused(BaseException):
    """Signals that a model cannot be captured; a BaseException that no user's code catches."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def record(
    model: Layer,
    inputs: Nest,
    unopened: Unopened,
    losses: Sequence[Any] = (),
    shape_inputs: Keys = (),
) -> Capture:
    """Runs a model's forward once and returns the capture.

    Parameters, buffers, random states and Python attributes of layers are restored.

    Args:
        model: Any layer. It runs in the mode that it is in.
        inputs: One argument; a tuple of several; a dict by name.
        unopened: The layers that are nodes as a whole; classes that could not be opened are added.
        losses: The loss functions.
        shape_inputs: The keys of inputs whose numbers the forward may read.

    Raises:
        CaptureError: The model's own forward does something that cannot be captured, or stores a
            tensor for a loss.
    """
    generators = Generators(model)
    follows = False
    while True:
        # A forward may write into what it is given.
        arguments = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        try:
            before = {id(tensor): tensor for loss in losses for _, tensor in kept_for(loss)}
            with state_kept(model) as written:
                tracer = _Tracer(model, unopened, shape_inputs)
                states = generators.states()
                trace = tracer.run(
                    arguments,
                    RandomLines(generators, tracer.refuse_random_line) if follows else None,
                )
                drew = generators.states() != states
                obstacles.require_nothing_kept(model, losses, before)
                obstacles.require_no_new_parameters(model, tracer.owned)
            trace = tracer.with_state(trace, written)
        except _Refused as refused:
            raise refused.error from None
        for kind, reason in tracer.closed.items():
            unopened.add(kind, reason)
        if not tracer.closed and (follows or not drew):
            return replace(trace, draws=drew)
        follows = follows or drew


class _Tracer(Walk):
    """Records one run."""

    def __init__(self, model: Layer, unopened: Unopened, shape_inputs: Keys) -> None:
        super().__init__(model, unopened)
        self._shape_inputs = shape_inputs
        self._state = RunState(model)
        #: By id, the layers that were switched between training and evaluation, with the line.
        self._switched: dict[int, tuple[Layer, str]] = {}
        #: By the name of a buffer, the layer whose code reads its numbers, and the line.
        self._numbers: dict[str, tuple[Layer, obstacles.Obstacle, str]] = {}
        self._nodes: list[Node] = []
        self._values: dict[int, ValueId] = {}
        #: The tensor of each value, kept so that no other tensor gets its id.
        self._tensors: list[Tensor] = []
        self._likes: list[Like] = []
        self._marks: list[int] = []
        #: By path, why a layer with sublayers is a node.
        self._whole: dict[str, str] = {}
        #: Texts for actions that no stage repeats, each once.
        self._left_out: dict[str, None] = {}
        #: The lengths of the lists and dicts of each layer around the current line.
        self._lengths: list[dict[str, int]] = []
        self._sizes = Sizes()
        self._random_lines: RandomLines | None = None
        #: The automatic casts around the forward.
        self._casts: Casts | None = None
        #: The classes of layers that cannot be opened, and why.
        self.closed: dict[type, str] = {}

    def owned(self, tensor: Tensor) -> Owned | None:
        """Returns the placeholder of a parameter or buffer that existed before the run."""
        return self._state.get(tensor)

    def run(self, inputs: Nest, random_lines: RandomLines | None = None) -> Capture:
        """Runs the forward.

        Args:
            inputs: The model's inputs.
            random_lines: Finds the lines that draw random numbers; None if none do.

        Raises:
            CaptureError: The model's own forward does something that cannot be captured.
        """
        self._random_lines = random_lines
        args, named = arguments_of(inputs)
        for tensor in tensors_of(inputs):
            self._number(tensor)
        self._sizes.fix(whole_at(inputs, self._shape_inputs))
        noted = self._with_placeholders(inputs)
        halves = {str(p.dtype).rpartition(".")[2] for p in self._model.parameters()}
        half = "bfloat16" if "bfloat16" in halves else "float16"
        watching = random_lines.watching() if random_lines else nullcontext()
        with intercepting(self), noting(self.mark), watching, casts_visible(half) as self._casts:
            output = self._model(*args, **named)
        _require_tensors(self._model, output)
        nodes, marks = at_makers(self._nodes, self._marks)
        return Capture(
            tuple(nodes),
            noted,
            self._with_placeholders(output),
            tuple(self._likes),
            tuple(marks),
            switched=tuple(Mode(layer, layer.training) for layer, _ in self._switched.values()),
            switched_at=next((place for _, place in self._switched.values()), ""),
            unopened=self._whole,
            left_out=tuple(self._left_out),
            selected=frozenset(
                value for value, t in enumerate(self._tensors) if self._sizes.selected(t)
            ),
        )

    def refuse_random_line(self, place: str) -> None:
        """Closes the layer of a line that draws from a generator that is not Paddle's."""
        self._close(self._opened[-1], obstacles.DRAWS, place)

    def with_state(self, trace: Capture, ids: set[int]) -> Capture:
        """Adds to a capture the parameters and buffers that the run wrote into.

        Raises:
            CaptureError: Python code in the model's own forward reads a written value, or no node
                wrote it.
        """
        changed = self._state.changed(ids)
        self._unopened.written.update(changed)
        for name in self._numbers.keys() & self._unopened.written:
            self._close(*self._numbers[name])
        states = self._state.through_views(trace.nodes)
        for name in changed.keys() - frozenset().union(*states) if not self.closed else ():
            self._close(self._model, obstacles.unseen(name), forward_place(self._model) or "?")
        nodes = (replace(node, state=state) for node, state in zip(trace.nodes, states))
        numbers = tuple(self._state.named(name) for name in self._numbers)
        return replace(trace, nodes=tuple(nodes), changed=changed, numbers=numbers)

    def mark(self) -> None:
        """Records that a stage begins here."""
        if self._inside:
            raise CaptureError(
                "pipe_split() is called in a sublayer that is a node as a whole",
                where=user_place(),
                cause="it has no sublayers, is of Paddle's, in no_split, or does what no node can "
                "be made of",
                fix="call pipe_split between sublayers, in the forward of a layer that has some",
            )
        self._marks.append(len(self._nodes))

    def enter_layer(self, layer: Layer) -> None:
        """Stores the lengths of a layer's lists and dicts before its forward."""
        self._lengths.append(_lengths(layer))

    def leave_layer(self, output: Nest) -> None:
        """Checks that the outputs of an opened layer come from nodes, and notes longer lists."""
        self._with_placeholders(output)
        layer, before = self._opened[-1], self._lengths.pop()
        for name, size in _lengths(layer).items():
            if size != before.get(name, size):
                self._left_out.setdefault(f"it changes {name!r}, {forward_place(layer)}")

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls the function, and records that it is not recomputed."""
        if not self._inside:
            self._left_out.setdefault(
                f"it recomputes, {user_place()}; pass recompute_interval to fleetpipe.pipeline"
            )
        return super().recompute(call, function, args)

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Tracks sizes of operations inside a node."""
        if self._sizes.trying:
            return function(*args, **named)
        if self._inside:
            self._state.heard(function, args)
            return self._sizes.done(function, args, named)
        try:
            return super().operation(function, args, named)
        except IndexError:
            # Paddle's loop over the rows of a tensor reads its size by this error.
            if self._sizes.selected(args[0]):
                self._refuse(obstacles.SIZE)
            raise

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Closes a layer that reads numbers of a value, unless only the signature sets them."""
        owned = self._state.get(args[0])
        if self._inside:
            self._sizes.blind |= not (self._sizes.trying or self._sizes.fixed(args[0]))
        elif id(args[0]) in self._values:
            checks = only_checked() or (args[0].dtype == paddle.bool and only_raises())
            if not (checks or self._sizes.fixed(args[0])):
                self._refuse(obstacles.READS)
        elif owned is not None and args[0].stop_gradient:
            reader = (self._opened[-1], obstacles.reads_state(owned.path), user_place())
            self._numbers.setdefault(owned.path, reader)
        elif owned is not None:
            self._refuse(obstacles.reads_state(owned.path))
        return super().read(function, args, named)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Closes a layer that uses the memory of a value, or of a parameter or buffer."""
        if not self._inside:
            users = not asked_by_paddle()
            if function.__name__ == "get_tensor" and not users:
                # Paddle 2.6 computes int(x) that way.
                return self.read(function, args, named)
            owned = any(self._state.get(arg) is not None for arg in args)
            # Paddle itself uses the memory of a new parameter to set its first value.
            if owned or (id(args[0]) in self._values and users):
                self._refuse(obstacles.MEMORY)
        return super().memory(function, args, named)

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """Returns a shape in which sizes that depend on numbers are tracked."""
        if self._sizes.trying or not self._sizes.selected(tensor):
            return shape
        if self._inside:
            self._sizes.blind = True
            return shape
        return self._sizes.dimensions(tensor, shape, lambda: self._refuse(obstacles.SIZE))

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Closes a layer that computes gradients."""
        if not self._inside:
            self._refuse(obstacles.BACKWARD)
        return super().backward(function, args, named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """Closes a layer that stores a tensor in an attribute; notes other attributes it sets."""
        if not self._inside:
            if name == "training" and id(layer) in self._paths and value != layer.training:
                self._switched.setdefault(id(layer), (layer, user_place()))
            buffer = buffers_in(layer).get(name)
            if buffer is not None and value is not buffer:
                if not isinstance(value, paddle.Tensor):
                    what = f"takes the buffer {name!r} away"
                    self._refuse(obstacles.keeps_tensor(name)._replace(what=what))
            elif buffer is None and not asked_by_paddle():
                if isinstance(value, paddle.Tensor):
                    self._refuse(obstacles.keeps_tensor(name))
                else:
                    self._left_out.setdefault(f"it sets {name!r}, {user_place()}")
        super().assigned(put, layer, name, value)

    def node(self, call: NodeCall) -> Any:
        """Runs the call of a node, and records it with its inputs and outputs."""
        if self._sizes.asked_for and any(
            type(x) is Size for _, x in parts((call.args, call.named))
        ):
            call = call._replace(args=whole(call.args), named=whole(call.named))
        args, named = self._with_placeholders(call.args), self._with_placeholders(call.named)
        layer: Layer = call.function
        if isinstance(layer, paddle.nn.Layer) and sublayers_in(layer):
            self._whole[call.scopes[-1].path] = self._unopened.reason(layer) or "it has hooks"
        tensors = tensors_in((call.args, call.named))
        self._require_writable(call, tensors)
        state = self._state.of(layer, tensors, len(self._nodes))
        versions = list(map(_version, tensors))
        parts_of_layer, state_of_layer = [], []
        if isinstance(layer, paddle.nn.Layer):
            parts_of_layer = layer.sublayers(include_self=True)
            state_of_layer = list(layer.state_dict().values())
        modes = tuple(Mode(part, part.training) for part in parts_of_layer)
        with lent([*tensors, *state_of_layer]):
            output = self._run_node(call)
        values, function = self._values, call.function
        if is_silent(function) and id(tensors[0]) in values:
            function = raising_version(function)
            note_write(tensors[0])
        changed = {id(t): t for t, version in zip(tensors, versions) if _version(t) != version}
        if call.is_users:
            # A copy is a value of its own: the layer may return its input in this run only.
            passed = {id(tensor) for tensor in tensors} - changed.keys()
            if any(id(tensor) in passed for tensor in tensors_of(output)):
                output = map_tensors(lambda t: paddle.assign(t) if id(t) in passed else t, output)
        made = list(tensors_of(output))
        self._state.called(function, tensors, made, [*changed.values()])
        written = [(values[key], self._number(changed[key])) for key in changed if key in values]
        outputs = [self._value_of(tensor, tensors) for tensor in made]
        node = Node(
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
            automatic_casts() if casts_of_now() != self._casts else None,
        )
        self._nodes.append(node)
        if self._unopened.selecting and node.name in self._unopened.selecting:
            self._sizes.select(tensors_in(output))
        self._sizes.blind = False
        return output

    def _run_node(self, call: NodeCall) -> Any:
        """Calls a node, and records what its outputs depend on."""
        if not isinstance(call.function, paddle.nn.Layer):
            return self._sizes.done(call.call, call.args, call.named, self._is_constant)
        with (
            self._random_lines.node() if self._random_lines else nullcontext(lambda: False) as drew
        ):
            output = call.do()
        opaque = self._sizes.blind or drew()
        if opaque and any(isinstance(leaf, _NUMBERS) for _, leaf in parts(output)):
            self._refuse(obstacles.returns_number(str(call.scopes[-1])))
        return output

    def _require_writable(self, call: NodeCall, tensors: Sequence[Tensor]) -> None:
        """Closes a layer that writes into a tensor in a way that a stage cannot repeat."""
        if call.function is set_data and len(tensors) > 1:
            refusal = self._state.refusal(tensors[0], tensors[1], call.call is set_data)
            if refusal is not None:
                self._refuse(refusal)
        target = target_of(call.function, call.args)
        if target is None or id(target) in self._values:
            return
        owned = self._state.get(target)
        if owned is None:
            if has_memory(target):
                self._refuse(obstacles.FOREIGN)
            return
        if target.stop_gradient or is_silent(call.function) or not paddle.is_grad_enabled():
            return
        if any(not tensor.stop_gradient for tensor in tensors if tensor is not target):
            self._refuse(obstacles.has_graph(owned.path))
        elif call.function.__name__ != "assign_out_":
            self._refuse(obstacles.outside_no_grad(owned.path))

    def _value_of(self, tensor: Tensor, tensors: Sequence[Tensor]) -> ValueId:
        """Returns the value number of a tensor that a node returned."""
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        number = self._number(tensor)
        if self._state.get(tensor) is not None and any(tensor is one for one in tensors):
            # An operation returns the buffer that it wrote into: it stays a buffer.
            del self._values[id(tensor)]
        return number

    def _number(self, tensor: Tensor) -> ValueId:
        """Gives a tensor a new value number."""
        self._values[id(tensor)] = number = len(self._tensors)
        self._tensors.append(tensor)
        self._likes.append(like(tensor))
        return number

    def _with_placeholders(self, value: Nest) -> Nest:
        """Replaces the tensors in ``value`` by their placeholders."""
        return map_parts(
            value, lambda leaf: self._placeholder(leaf) if isinstance(leaf, paddle.Tensor) else leaf
        )

    def _placeholder(self, tensor: Tensor) -> Nest:
        """Returns the placeholder of a tensor; the tensor itself if it is a constant."""
        number = self._values.get(id(tensor))
        if number is not None:
            return Ref(number)
        owned = self._state.get(tensor)
        if owned is not None:
            return owned
        if not tensor.stop_gradient:
            keepers = (
                obstacles.uses_attribute(path, name)
                for path, layer in self._model.named_sublayers()
                for name, value in (*vars(layer).items(), *buffers_in(layer).items())
                if value is tensor
            )
            self._refuse(next(keepers, obstacles.UNKNOWN))
        return tensor

    def _is_constant(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._values and self._state.get(tensor) is None

    def _refuse(self, obstacle: obstacles.Obstacle) -> None:
        """Closes the innermost opened layer, for an obstacle in its code."""
        self._close(self._opened[-1], obstacle, user_place())

    def _close(self, layer: Layer, obstacle: obstacles.Obstacle, place: str) -> None:
        """Marks a layer that cannot be opened; the run goes on, to find others too.

        Raises:
            _Refused: The layer is the model itself.
        """
        if layer is self._model:
            what = f"the forward of {type(layer).__name__} {obstacle.what}"
            error = CaptureError(what, where=place, cause=obstacle.cause, fix=obstacle.fix)
            raise _Refused(error)
        self.closed.setdefault(type(layer), f"its forward {obstacle.what}, {place}")


def _version(tensor: Tensor) -> tuple[int, bool]:
    """Returns a value that changes when a tensor is written into or detached."""
    return tensor.inplace_version, tensor.stop_gradient


def _lengths(layer: Layer) -> dict[str, int]:
    """Returns the lengths of the lists, dicts and sets among a layer's attributes."""
    return {
        name: len(value)
        for name, value in vars(layer).items()
        if isinstance(value, (list, dict, set)) and name not in TABLES
    }


def _require_tensors(model: Layer, output: Nest) -> None:
    """Raises an error if a model returns other objects than tensors and plain values."""
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
