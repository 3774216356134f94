"""Runs a model's forward once and records its calls: :func:`record`.

A layer is opened if the calls within its forward are recorded one by one. If the code of an opened
layer does something that cannot be captured, such as reading a tensor's numbers, the layer's class
becomes unopenable, and the forward runs again: such a layer is a single node, called in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lend_zeros
from fleetpipe.capture.tracing import obstacles
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.obstacles import RunState
from fleetpipe.capture.tracing.signature import (
    PLAIN,
    Keys,
    Size,
    Sizes,
    integer_tensors_at,
    sizes_to_ints,
    tensors_in,
)
from fleetpipe.capture.tracing.user_lines import (
    Generators,
    RandomLines,
    called_by_paddle,
    forward_location,
    in_checking_function,
    on_pipe_split,
    tests_before_raise,
    user_location,
)
from fleetpipe.capture.tracing.value import (
    Capture,
    Mode,
    Node,
    NodeCall,
    NodeFinder,
    Ref,
    TensorSpec,
    Unopened,
    ValueId,
    arguments_of,
    map_parts,
    move_hooks_to_makers,
    parts,
    spec_of,
)
from fleetpipe.dygraph.batch.losses import tensors_read_by
from fleetpipe.dygraph.nest import leaves, map_tensors, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import Casts, automatic_casts, casts_of_now, casts_visible
from fleetpipe.paddle_api.eager_operations import (
    Function,
    intercepting,
    is_silent,
    set_data,
    target_of,
    with_raised_version,
)
from fleetpipe.paddle_api.layer import TABLES, buffers_in, sublayers_in
from fleetpipe.paddle_api.tensor import has_memory, note_write

#: The classes of Python's and NumPy's numbers and arrays.
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
    """Captures one run of a model's forward.

    The forward runs again, until each layer that it opens can be captured. Then the model's
    parameters, buffers, random states and Python attributes are restored.

    Args:
        model: Any layer. It runs in its current mode, training or evaluation.
        inputs: One argument; a tuple of several; a dict by name.
        unopened: The layers that are not opened; classes that turn out to be unopenable are added.
        losses: The loss functions.
        shape_inputs: The keys of inputs whose numbers the forward may read.

    Raises:
        CaptureError: The model's own forward does something that cannot be captured, or stores a
            tensor for a loss.
    """
    generators = Generators(model)
    # Watching each line is slow: a run does so only after another one has drawn random numbers.
    watches_lines = False
    while True:
        # A forward may write into what it is given.
        arguments = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        try:
            before = {id(tensor): tensor for loss in losses for _, tensor in tensors_read_by(loss)}
            with state_kept(model) as written:
                tracer = _Tracer(model, unopened, shape_inputs)
                states = generators.states()
                trace = tracer.run(arguments, generators if watches_lines else None)
                drew = generators.states() != states
                obstacles.require_no_tensor_kept_for_loss(model, losses, before)
                obstacles.require_no_new_parameters(model, tracer.state.ref_of)
            trace = tracer.add_state(trace, written)
        except _Refused as refused:
            raise refused.error from None
        for layer_class, reason in tracer.unopenable.items():
            unopened.add(layer_class, reason)
        if not tracer.unopenable and (watches_lines or not drew):
            return replace(trace, draws=drew)
        watches_lines = watches_lines or drew


class _Tracer(NodeFinder):
    """Records the nodes of one run of a model's forward.

    Its methods that override those of :class:`NodeFinder` are called within :meth:`run`. The
    current layer is the innermost opened layer that is running, whose code makes the call.

    Attributes:
        state: Tracks the parameters and buffers that the nodes use and write.
        unopenable: The classes of layers that cannot be captured call by call, and why.
    """

    def __init__(self, model: Layer, unopened: Unopened, shape_inputs: Keys) -> None:
        super().__init__(model, unopened)
        self._shape_inputs = shape_inputs
        self.state = RunState(model)
        #: By id, the layers that were switched between training and evaluation, with the line.
        self._switched: dict[int, tuple[Layer, str]] = {}
        #: By the name of a buffer, the layer whose code reads its numbers, and the line.
        self._number_reads: dict[str, tuple[Layer, obstacles.Obstacle, str]] = {}
        self._nodes: list[Node] = []
        #: The value that a tensor holds now, by the tensor's id.
        self._values: dict[int, ValueId] = {}
        #: The tensor of each value, kept so that no other tensor gets its id.
        self._tensors: list[Tensor] = []
        #: The shape and dtype of each value.
        self._specs: list[TensorSpec] = []
        #: The number of the next node at each call of ``pipe_split``.
        self._pipe_splits: list[int] = []
        #: By path, why a layer with sublayers is a node.
        self._unopened_reasons: dict[str, str] = {}
        #: Texts for actions that no stage repeats, each once.
        self._left_out: dict[str, None] = {}
        #: For each opened layer that is running, the lengths of its lists and dicts before.
        self._lengths_before: list[dict[str, int]] = []
        self._sizes = Sizes()
        self._random_lines: RandomLines | None = None
        #: The automatic casts around the forward.
        self._casts: Casts | None = None
        self.unopenable: dict[type, str] = {}

    def run(self, inputs: Nest, generators: Generators | None = None) -> Capture:
        """Runs the forward, and returns its capture without the state that it uses and writes.

        Args:
            inputs: The model's inputs.
            generators: The random generators of Python and NumPy, to find lines that draw; None for
                no search.

        Raises:
            CaptureError: The model's own forward does something that cannot be captured.
        """
        if generators is not None:
            self._random_lines = RandomLines(
                generators,
                lambda line: self._refuse_to_open(self._opened[-1], obstacles.DRAWS, line),
            )
        args, named = arguments_of(inputs)
        for tensor in tensors_of(inputs):
            self._add_value(tensor)
        self._sizes.mark_fixed(integer_tensors_at(inputs, self._shape_inputs))
        input_refs = self._with_placeholders(inputs)
        dtypes = {str(p.dtype).rpartition(".")[2] for p in self._model.parameters()}
        half = "bfloat16" if "bfloat16" in dtypes else "float16"
        watching = self._random_lines.watching() if self._random_lines else nullcontext()
        with (
            intercepting(self),
            on_pipe_split(self.record_pipe_split),
            watching,
            casts_visible(half) as self._casts,
        ):
            output = self._model(*args, **named)
        _require_tensors(self._model, output)
        nodes, marks = move_hooks_to_makers(self._nodes, self._pipe_splits)
        return Capture(
            tuple(nodes),
            input_refs,
            self._with_placeholders(output),
            tuple(self._specs),
            tuple(marks),
            switched=tuple(Mode(layer, layer.training) for layer, _ in self._switched.values()),
            switched_at=next((place for _, place in self._switched.values()), ""),
            unopened=self._unopened_reasons,
            left_out=tuple(self._left_out),
            data_dependent=frozenset(
                value for value, t in enumerate(self._tensors) if self._sizes.is_data_dependent(t)
            ),
        )

    def add_state(self, trace: Capture, ids: set[int]) -> Capture:
        """Returns a capture with the parameters and buffers that each node uses or the run wrote.

        Args:
            trace: The capture of the run, as :meth:`run` returned it.
            ids: The ids of parameters and buffers that the run is known to have changed.

        Raises:
            CaptureError: Python code in the model's own forward reads a written value, or no node
                wrote it.
        """
        changed = self.state.written_state(ids)
        self._unopened.written.update(changed)
        for name in self._number_reads.keys() & self._unopened.written:
            self._refuse_to_open(*self._number_reads[name])
        states = self.state.states_with_views(trace.nodes)
        for name in changed.keys() - frozenset().union(*states) if not self.unopenable else ():
            self._refuse_to_open(
                self._model, obstacles.changes_unseen(name), forward_location(self._model) or "?"
            )
        nodes = (replace(node, state=state) for node, state in zip(trace.nodes, states))
        numbers = tuple(self.state.ref_named(name) for name in self._number_reads)
        return replace(trace, nodes=tuple(nodes), changed=changed, numbers=numbers)

    def record_pipe_split(self) -> None:
        """Records that a stage may begin before the next node; called by ``pipe_split``.

        Raises:
            CaptureError: A node is running: ``pipe_split`` is called inside of it.
        """
        if self._in_node:
            raise CaptureError(
                "pipe_split() is called in a sublayer that is a node as a whole",
                where=user_location(),
                cause="it has no sublayers, is of Paddle's, in no_split, or does what no node can "
                "be made of",
                fix="call pipe_split between sublayers, in the forward of a layer that has some",
            )
        self._pipe_splits.append(len(self._nodes))

    def enter_layer(self, layer: Layer) -> None:
        """Stores the lengths of an opened layer's lists, dicts and sets before its forward."""
        self._lengths_before.append(_container_lengths(layer))

    def leave_layer(self, output: Nest) -> None:
        """Checks that the outputs of an opened layer come from nodes.

        It also records each list, dict or set of the layer whose length the forward has changed,
        since no stage repeats that.

        Args:
            output: The output of the layer, the innermost one that is opened now.
        """
        self._with_placeholders(output)
        layer, lengths_before = self._opened[-1], self._lengths_before.pop()
        for name, size in _container_lengths(layer).items():
            if size != lengths_before.get(name, size):
                self._left_out.setdefault(f"it changes {name!r}, {forward_location(layer)}")

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls the function of a recompute, and records that the stages do not recompute it.

        See :meth:`NodeFinder.recompute`.
        """
        if not self._in_node:
            self._left_out.setdefault(
                f"it recomputes, {user_location()}; pass recompute_interval to fleetpipe.pipeline"
            )
        return super().recompute(call, function, args)

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs an operation, as a node unless within a running node, and returns its output.

        In both cases :class:`Sizes` tracks which outputs have data-dependent sizes. The current
        layer becomes unopenable if it iterates over a tensor of such a size.
        """
        if self._sizes.is_trial_run:
            return function(*args, **named)
        if self._in_node:
            self.state.record_inner_write(function, args)
            return self._sizes.run(function, args, named)
        try:
            return super().operation(function, args, named)
        except IndexError:
            # Paddle's loop over the rows of a tensor reads its size by this error.
            if self._sizes.is_data_dependent(args[0]):
                self._refuse_current_layer(obstacles.SIZE)
            raise

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that reads the numbers in a tensor, and returns its result.

        Outside of a node, the current layer becomes unopenable if the tensor is a value of this
        run, a parameter or a buffer. Allowed are numbers that depend only on the signature of the
        inputs, numbers that the code only checks, and those of a buffer that no run writes into.

        Args:
            function: The function that reads the numbers.
            args: Its positional arguments: the tensor first.
            named: Its keyword arguments.
        """
        ref = self.state.ref_of(args[0])
        if self._in_node:
            if not (self._sizes.is_trial_run or self._sizes.is_fixed(args[0])):
                self._sizes.has_read_numbers = True
        elif id(args[0]) in self._values:
            checks = in_checking_function() or (
                args[0].dtype == paddle.bool and tests_before_raise()
            )
            if not (checks or self._sizes.is_fixed(args[0])):
                self._refuse_current_layer(obstacles.READS)
        elif ref is not None and args[0].stop_gradient:
            reader = (self._opened[-1], obstacles.reads_state(ref.path), user_location())
            self._number_reads.setdefault(ref.path, reader)
        elif ref is not None:
            self._refuse_current_layer(obstacles.reads_state(ref.path))
        return super().read(function, args, named)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that accesses a tensor's memory, and returns its result.

        Outside of a node, the current layer becomes unopenable if the memory is that of a parameter
        or buffer, or if its own code accesses that of a value of this run.

        Args:
            function: The function.
            args: Its positional arguments: the tensor first.
            named: Its keyword arguments.
        """
        if not self._in_node:
            by_paddle = called_by_paddle()
            if function.__name__ == "get_tensor" and by_paddle:
                # Paddle 2.6 computes int(x) that way.
                return self.read(function, args, named)
            is_state = any(self.state.ref_of(arg) is not None for arg in args)
            # Paddle itself uses the memory of a new parameter to set its first value.
            if is_state or (id(args[0]) in self._values and not by_paddle):
                self._refuse_current_layer(obstacles.MEMORY)
        return super().memory(function, args, named)

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """Returns the shape that the model's code gets when it reads a tensor's.

        Outside of a node, a :class:`Size` stands for each data-dependent size; inside of a node it
        is the shape itself.

        Args:
            tensor: The tensor.
            shape: Its shape.
        """
        if self._sizes.is_trial_run or not self._sizes.is_data_dependent(tensor):
            return shape
        if self._in_node:
            self._sizes.has_read_numbers = True
            return shape
        return self._sizes.track_shape(
            tensor, shape, lambda: self._refuse_current_layer(obstacles.SIZE)
        )

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that computes gradients, and returns its result.

        The current layer becomes unopenable if its own code makes the call, outside of a node.
        """
        if not self._in_node:
            self._refuse_current_layer(obstacles.BACKWARD)
        return super().backward(function, args, named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """Sets an attribute of a layer by ``put(layer, name, value)``.

        The current layer becomes unopenable if its code stores a tensor so, or replaces a buffer by
        something else than a tensor. A switch between training and evaluation is recorded, and so
        is any other attribute that the code sets, since no stage repeats that.
        """
        if not self._in_node:
            if name == "training" and id(layer) in self._paths and value != layer.training:
                self._switched.setdefault(id(layer), (layer, user_location()))
            buffer = buffers_in(layer).get(name)
            if buffer is not None and value is not buffer:
                # Another tensor is allowed: a node makes it the buffer, in each stage too.
                if not isinstance(value, paddle.Tensor):
                    action = f"takes the buffer {name!r} away"
                    self._refuse_current_layer(obstacles.keeps_tensor(name)._replace(action=action))
            elif buffer is None and not called_by_paddle():
                if isinstance(value, paddle.Tensor):
                    self._refuse_current_layer(obstacles.keeps_tensor(name))
                else:
                    self._left_out.setdefault(f"it sets {name!r}, {user_location()}")
        super().assigned(put, layer, name, value)

    def node(self, call: NodeCall) -> Any:
        """Runs the call of a node, records the node, and returns the call's output."""
        # Code that has read a data-dependent size passes it on as a Size; nodes take numbers.
        if self._sizes.handed_out and any(
            type(x) is Size for _, x in parts((call.args, call.named))
        ):
            call = call._replace(args=sizes_to_ints(call.args), named=sizes_to_ints(call.named))
        args, named = self._with_placeholders(call.args), self._with_placeholders(call.named)
        # A layer, or a function of Paddle's.
        layer: Layer = call.function
        if isinstance(layer, paddle.nn.Layer) and sublayers_in(layer):
            reason = self._unopened.reason(layer) or "it has hooks"
            self._unopened_reasons[call.scopes[-1].path] = reason
        tensors = tensors_in((call.args, call.named))
        self._require_writable(call, tensors)
        state = self.state.names_used_by(layer, tensors, len(self._nodes))
        versions = list(map(_version, tensors))
        layers_in_node, state_of_layer = [], []
        if isinstance(layer, paddle.nn.Layer):
            layers_in_node = layer.sublayers(include_self=True)
            state_of_layer = list(layer.state_dict().values())
        modes = tuple(Mode(sublayer, sublayer.training) for sublayer in layers_in_node)
        with lend_zeros([*tensors, *state_of_layer]):
            output = self._run_node(call)
        values, function = self._values, call.function
        # A silent write into a value raises its version, here and in stages: autograd notices it.
        if is_silent(function) and id(tensors[0]) in values:
            function = with_raised_version(function)
            note_write(tensors[0])
        # By id, the arguments into which the call has written.
        changed = {id(t): t for t, version in zip(tensors, versions) if _version(t) != version}
        if call.is_users:
            # The layer may return its input itself in this run only: a copy is a value of its own.
            same = {id(tensor) for tensor in tensors} - changed.keys()
            if any(id(tensor) in same for tensor in tensors_of(output)):
                output = map_tensors(lambda t: paddle.assign(t) if id(t) in same else t, output)
        output_tensors = list(tensors_of(output))
        self.state.record_call(function, tensors, output_tensors, [*changed.values()])
        written = [(values[key], self._add_value(changed[key])) for key in changed if key in values]
        outputs = [self._value_of_output(tensor, tensors) for tensor in output_tensors]
        node = Node(
            function,
            args,
            named,
            tuple(outputs),
            tuple(written),
            call.scopes,
            user_location(),
            paddle.is_grad_enabled(),
            state,
            modes,
            automatic_casts() if casts_of_now() != self._casts else None,
        )
        self._nodes.append(node)
        data_dependent_nodes = self._unopened.data_dependent_nodes
        if data_dependent_nodes and node.name in data_dependent_nodes:
            self._sizes.mark_data_dependent(tensors_in(output))
        self._sizes.has_read_numbers = False
        return output

    def _run_node(self, call: NodeCall) -> Any:
        """Calls a node, tracks the sizes of its outputs, and returns its output.

        The current layer becomes unopenable if the node returns a number of Python's that depends
        on the numbers in a batch or on chance.
        """
        if not isinstance(call.function, paddle.nn.Layer):
            return self._sizes.run(call.call, call.args, call.named, self._is_constant)
        lines = self._random_lines
        with lines.allow_in_node() if lines else nullcontext(lambda: False) as drew:
            output = call.do()
        may_vary = self._sizes.has_read_numbers or drew()
        if may_vary and any(isinstance(leaf, _NUMBERS) for _, leaf in parts(output)):
            self._refuse_current_layer(obstacles.returns_number(str(call.scopes[-1])))
        return output

    def _require_writable(self, call: NodeCall, tensors: Sequence[Tensor]) -> None:
        """Makes the current layer unopenable if a node will write where no stage can repeat it.

        ``tensors`` are the tensors among the arguments of the call, which is still to be made.
        """
        # The code assigns to ``target.data``, or sets another tensor in place of a buffer.
        if call.function is set_data and len(tensors) > 1:
            target, value = tensors[:2]
            obstacle = self.state.replacement_obstacle(target, value, call.call is set_data)
            if obstacle is not None:
                self._refuse_current_layer(obstacle)
        target = target_of(call.function, call.args)
        # A stage repeats a write into a value, which is a new value afterwards.
        if target is None or id(target) in self._values:
            return
        ref = self.state.ref_of(target)
        if ref is None:
            # A tensor without memory is allowed: no earlier micro-batch has left a value in it.
            if has_memory(target):
                self._refuse_current_layer(obstacles.FOREIGN)
            return
        # Allowed are writes into buffers and frozen parameters, those that leave the version as it
        # is, and all while gradients are off.
        if target.stop_gradient or is_silent(call.function) or not paddle.is_grad_enabled():
            return
        # A trained parameter, while gradients are on: only paddle.assign may write into it, and
        # only values that need no gradient.
        if any(not tensor.stop_gradient for tensor in tensors if tensor is not target):
            self._refuse_current_layer(obstacles.writes_gradient_value(ref.path))
        elif call.function.__name__ != "assign_out_":
            self._refuse_current_layer(obstacles.outside_no_grad(ref.path))

    def _value_of_output(self, tensor: Tensor, inputs: Sequence[Tensor]) -> ValueId:
        """Returns the number of the value that an output of a node holds, a new one or an earlier.

        ``inputs`` are the tensors among the node's arguments.
        """
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        number = self._add_value(tensor)
        if self.state.ref_of(tensor) is not None and any(tensor is item for item in inputs):
            # An operation returns the buffer that it wrote into. Later nodes use it as a buffer.
            del self._values[id(tensor)]
        return number

    def _add_value(self, tensor: Tensor) -> ValueId:
        """Adds a value, which the tensor holds from now on, and returns its number."""
        self._values[id(tensor)] = number = len(self._tensors)
        self._tensors.append(tensor)
        self._specs.append(spec_of(tensor))
        return number

    def _with_placeholders(self, value: Nest) -> Nest:
        """Returns nested tuples, lists and dicts in which placeholders replace the tensors."""
        return map_parts(
            value, lambda leaf: self._placeholder(leaf) if isinstance(leaf, paddle.Tensor) else leaf
        )

    def _placeholder(self, tensor: Tensor) -> Nest:
        """Returns the placeholder of a tensor; the tensor itself if it is a constant.

        The current layer becomes unopenable if the tensor needs a gradient and no node made it.
        """
        number = self._values.get(id(tensor))
        if number is not None:
            return Ref(number)
        ref = self.state.ref_of(tensor)
        if ref is not None:
            return ref
        if not tensor.stop_gradient:
            keepers = (
                obstacles.uses_attribute(path, name)
                for path, layer in self._model.named_sublayers()
                for name, value in (*vars(layer).items(), *buffers_in(layer).items())
                if value is tensor
            )
            self._refuse_current_layer(next(keepers, obstacles.UNKNOWN))
        return tensor

    def _is_constant(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is neither a value of this run nor a parameter or buffer."""
        return id(tensor) not in self._values and self.state.ref_of(tensor) is None

    def _refuse_current_layer(self, obstacle: obstacles.Obstacle) -> None:
        """Makes the innermost opened layer unopenable, for an obstacle in its code."""
        self._refuse_to_open(self._opened[-1], obstacle, user_location())

    def _refuse_to_open(self, layer: Layer, obstacle: obstacles.Obstacle, location: str) -> None:
        """Makes a layer's class unopenable; the run goes on, to find other such layers too.

        ``location`` is the file and line of the code that cannot be captured.

        Raises:
            _Refused: The layer is the model itself.
        """
        if layer is self._model:
            problem = f"the forward of {type(layer).__name__} {obstacle.action}"
            error = CaptureError(problem, where=location, cause=obstacle.cause, fix=obstacle.fix)
            raise _Refused(error)
        self.unopenable.setdefault(type(layer), f"its forward {obstacle.action}, {location}")


def _version(tensor: Tensor) -> tuple[int, bool]:
    """Returns a pair that changes when a tensor is written into or detached."""
    return tensor.inplace_version, tensor.stop_gradient


def _container_lengths(layer: Layer) -> dict[str, int]:
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
            where=forward_location(model),
            expected="tensors, in tuples, lists and dicts, plain values among them",
            got=", ".join(dict.fromkeys(strange)) or repr(output),
            fix="return the tensors themselves; what is made of them, the loss function may make",
        )
