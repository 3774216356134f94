"""Splits the backward of stages into I and W, which computes the gradients of parameters later.

While a stage whose backward is split runs forward, :func:`run_leaf` replaces the ``forward`` of its
leaf layers; at all other times layers have their own forwards. Action I adds the calls of leaf
layers to the tape of the micro-batch, and W computes their weight gradients from it. Start with
:class:`SplitBackward`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.added_gradients import GradientArrivals, LayersOf, Sums
from fleetpipe.dygraph.backward.layer_state import changes
from fleetpipe.dygraph.backward.leaf import (
    CallProperties,
    CannotWait,
    Leaf,
    has_parameters_alone,
    inspect_call,
    leaves_of,
    tensors_in,
)
from fleetpipe.dygraph.backward.leaf_call import Call, GraphCall, Refusals, Tape, connect_call
from fleetpipe.dygraph.backward.linear_and_embedding import (
    LookupCall,
    ProductCall,
    looks_up,
    product_of,
)
from fleetpipe.dygraph.nest import leaves_like, needs_gradient, replace
from fleetpipe.dygraph.random_keys import earlier_backward_context
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.extras import extra
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import saves_freely
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import MicroBatch, flatten

#: ``forward(*args, **named)`` of a layer.
Forward = Callable[..., Nest]

#: Stands for the forward of a layer that has none among its own attributes.
_MISSING = object()

_NOTHING = nullcontext()


class _ReplacedForwards:
    """Replaces the ``forward`` of some layers for a while; a ``Change`` of ``layer_state``."""

    def __init__(self, forwards: Sequence[tuple[Layer, Forward]]) -> None:
        """Stores layers, each with the forward that replaces its own."""
        self._forwards = forwards
        self._originals: list[tuple[Layer, object]] = []

    def begin(self) -> None:
        """Replaces the forwards."""
        for layer, forward in self._forwards:
            # Not by Layer.__setattr__, which looks for parameters first.
            self._originals.append((layer, layer.__dict__.get("forward", _MISSING)))
            layer.__dict__["forward"] = forward

    def end(self) -> None:
        """Restores the forwards, the last replaced one first."""
        while self._originals:
            layer, forward = self._originals.pop()
            if forward is _MISSING:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


@contextmanager
def with_forwards(forwards: Iterable[tuple[Layer, Forward]]) -> Iterator[None]:
    """A context in which each layer has the forward that it is paired with.

    It refuses a forward that the user has set meanwhile, since the context's end would remove it.
    """
    pairs = list(forwards)
    replacement = _ReplacedForwards(pairs)
    changes.append(replacement)
    try:
        replacement.begin()
        yield
        for layer, forward in pairs:
            if layer.__dict__.get("forward", forward) is not forward:
                raise ConfigError(
                    f"the forward of a layer was replaced while its stage ran: {type(layer)}",
                    fix="replace it before the batch",
                )
    finally:
        changes.remove(replacement)
        replacement.end()


class SplitBackward:
    """Runs the split backwards of a schedule: has a tape for each stage and micro-batch."""

    def __init__(self, schedule: Schedule, layers_of: LayersOf, fast_leaves: bool = True) -> None:
        """Determines the stages and micro-batches whose backward is split.

        Args:
            schedule: The schedule; its actions I tell which backwards are split.
            layers_of: ``layers_of(stage)`` returns the layers of a stage of this process, by their
                numbers in the whole list.
            fast_leaves: Whether leaf layers may have faster forwards, with the same bits, if a
                backward is not split.
        """
        self._split = {
            (action.stage, MicroBatch(action.micro_batch))
            for row in schedule.actions
            for action in flatten(row)
            if action.kind == "I"
        }
        self._layers_of = layers_of
        self._leaves: dict[int, list[Leaf]] = {}
        self._fast_leaves = fast_leaves
        #: The faster forwards of each stage; None if no layer has one.
        self._fast: dict[int, Any] = {}
        self._tapes: dict[tuple[int, MicroBatch], Tape] = {}
        self._refusals = Refusals()
        self._sums = Sums()
        #: The kinds of action in which parameters got gradients; None before the first I.
        self.arrivals: GradientArrivals | None = None
        #: Whether the caller removes gradients from the parameters after each action; then the
        #: order in which micro-batches add gradients does not matter.
        self.by_name = False

    def forget_layers(self) -> None:
        """Forgets the stages' layers, because some were replaced between two batches."""
        self._leaves.clear()
        self._fast.clear()
        self.arrivals = None

    def splits(self, stage: int, micro_batch: MicroBatch) -> bool:
        """Whether the backward of a stage and micro-batch is split into I and W."""
        return (stage, micro_batch) in self._split

    def end(self) -> None:
        """Ends a batch: removes hooks on gradients, and drops the tapes of unfinished stages."""
        if self._sums.begun:
            self._sums.end()
        if self.arrivals is not None:
            self.arrivals.stop()
            if self._tapes:
                # The batch is unfinished, so the hooks saw a part of it: the next batch has hooks.
                self.arrivals = None
        self._tapes.clear()
        self._refusals.in_backward = False

    def recording(self, stage: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Returns the context of a forward, in which the stage's leaf layers have other forwards.

        If the backward is split, these are :func:`run_leaf`, which cuts calls out of the graph;
        otherwise they are faster forwards with the same bits.

        Args:
            stage: The global number of a stage of this process.
            micro_batch: The number within the batch.
        """
        if (stage, micro_batch) not in self._split:
            fast = self._fast[stage] if stage in self._fast else self._find_fast(stage)
            return _NOTHING if fast is None else fast.running()
        tape = self._tapes.setdefault((stage, micro_batch), Tape(self._refusals))
        forwards = []
        for leaf in self._leaves_of(stage):
            if leaf.waits:
                run = functools.partial(run_leaf, leaf, leaf.layer.forward, tape)
                forwards.append((leaf.layer, run))
            else:
                tape.uncut.add(leaf)
        return with_forwards(forwards)

    def in_backward(self, stage: int, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Returns the context of a full backward: recomputed layers have faster forwards in it."""
        if (stage, micro_batch) in self._split:
            return _NOTHING
        fast = self._fast[stage] if stage in self._fast else self._find_fast(stage)
        return _NOTHING if fast is None else fast.in_backward(self._sums)

    def _find_fast(self, stage: int) -> Any:
        """Stores and returns the leaf layers of a stage with a faster forward; None if none has."""
        fast = None
        if self._fast_leaves:
            layers = (leaf.layer for leaf in self._leaves_of(stage) if not leaf.static)
            fast = extra("fast_leaves").fast_forwards_of(layers)
        self._fast[stage] = fast
        return fast

    @contextmanager
    def input_grads(self, stage: int, micro_batch: MicroBatch) -> Iterator[None]:
        """A context in which autograd computes a stage's input gradients: action I.

        It leaves the weight gradients of leaf layers to action W, :meth:`weight_grads`.
        """
        tape = self._tapes[stage, micro_batch]
        for (tape_stage, tape_micro_batch), earlier in self._tapes.items():
            if tape_stage == stage and not self.by_name:
                # Autograd adds gradients of uncut layers now: the delayed ones of earlier
                # micro-batches come first.
                with earlier_backward_context(micro_batch - tape_micro_batch):
                    self._add_now(earlier, tape.uncut)
        tape.in_backward = self._refusals.in_backward = True
        with self._record_arrivals(stage, "I"), self.recording(stage, micro_batch):
            yield
        tape.in_backward = self._refusals.in_backward = False
        # Autograd has just added the gradients of these layers' uncut calls.
        self._add_now(tape, tape.uncut)

    def weight_grads(self, stage: int, micro_batch: MicroBatch) -> None:
        """Computes and adds the weight gradients that :meth:`input_grads` has left: action W."""
        tape = self._tapes[stage, micro_batch]
        with self._record_arrivals(stage, "W"), paddle.no_grad():
            self._add(tape.calls)
            tape.calls.clear()

    def _add_now(self, tape: Tape, leaves: Collection[Leaf]) -> None:
        """Computes and adds the delayed gradients of some leaf layers, and drops their calls."""
        calls = [call for call in tape.calls if call.leaf in leaves]
        if calls:
            with paddle.no_grad():
                self._add(calls)
            tape.calls[:] = [call for call in tape.calls if call.leaf not in leaves]

    def _add(self, calls: Sequence[Call]) -> None:
        """Adds the weight gradients of calls of leaf layers, all of one micro-batch.

        Autograd must be off.
        """
        uses = Counter(id(parameter) for call in calls for parameter in call.parameters)
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for call in calls:
            if all(uses[id(parameter)] == 1 for parameter in call.parameters):
                # Call by call, so that the memory of these gradients is free for the next ones.
                call.add_weight_grads(self._sums)
                continue
            for parameter, grad in call.weight_grads():
                earlier = shared.get(id(parameter))
                # Autograd too adds up all uses before it touches the parameter's gradient.
                total = grad if earlier is None else earlier[1] + grad
                shared[id(parameter)] = (parameter, total)
        self._sums.add(list(shared.values()))

    def release(self, stage: int, micro_batch: MicroBatch) -> None:
        """Drops the tape of a stage and micro-batch, if there is one."""
        self._tapes.pop((stage, micro_batch), None)

    def refusal(self) -> FleetPipeError | None:
        """Returns and forgets the error of a leaf call's backward; None if there was none."""
        refusal, self._refusals.error = self._refusals.error, None
        return refusal

    def reordered(self) -> list[str]:
        """Returns the names of leaf layers whose gradients may be added in another order than in B.

        The inputs and outputs of such a layer are connected by several paths, or its parameters are
        also used outside of it.
        """
        both = set() if self.arrivals is None else self.arrivals.parameters_in_both()
        return [
            leaf.name
            for leaves in self._leaves.values()
            for leaf in leaves
            if not all(properties.has_one_path for properties in leaf.properties_of_calls.values())
            or not both.isdisjoint(map(id, leaf.parameters))
        ]

    def _leaves_of(self, stage: int) -> list[Leaf]:
        """Returns the leaf layers of a stage, each once."""
        if stage not in self._leaves:
            # A layer may stand at several positions of the stage's list.
            leaves: dict[int, Leaf] = {}
            for index, layer in self._layers_of(stage).items():
                for leaf in leaves_of(index, layer):
                    leaves.setdefault(id(leaf.layer), leaf)
            self._leaves[stage] = list(leaves.values())
        return self._leaves[stage]

    def _record_arrivals(self, stage: int, kind: str) -> AbstractContextManager[None]:
        """Returns a context that records which parameters an action adds gradients to.

        It records in the first batch only; ``kind`` is "I" or "W".
        """
        if self.arrivals is None:
            self.arrivals = GradientArrivals()
        return (
            self.arrivals.record(stage, kind, self._layers_of)
            if self.arrivals.is_active
            else _NOTHING
        )


def run_leaf(
    leaf: Leaf, forward: Callable[..., Nest], tape: Tape, /, *args: Nest, **named: Nest
) -> Nest:
    """Calls a leaf layer's forward so that its weight gradients are computed later, if they can.

    Args:
        leaf: The layer.
        forward: The layer's forward.
        tape: The tape of the micro-batch, to which I adds the call.
        args: The positional arguments.
        named: The keyword arguments.

    Returns:
        The result of ``forward``, connected to the graph around it.
    """
    parameters = leaf.parameters
    trained = any(not parameter.stop_gradient for parameter in parameters)
    if not trained or not paddle.is_grad_enabled():
        return forward(*args, **named)
    try:
        tensors = _tensors_in_arguments(leaf, parameters, args, named)
    except CannotWait:
        tape.uncut.add(leaf)
        return forward(*args, **named)
    needs_grad = tuple([not tensor.stop_gradient for tensor in (*tensors, *parameters)])
    situation = len(tensors), needs_grad
    properties = leaf.properties_of_calls.get(situation)
    if properties is None:
        properties = inspect_call(parameters, forward, args, named)
        leaf.properties_of_calls[situation] = properties
        leaf.divisible &= properties.divisible
    # All calls of a layer wait or none: autograd adds up all uses before it changes the parameter's
    # gradient.
    if not leaf.divisible:
        tape.uncut.add(leaf)
        return forward(*args, **named)
    if (product := product_of(leaf, forward, tensors)) is not None:
        inputs = [tensor for tensor in tensors if not tensor.stop_gradient]
        (output,) = connect_call(
            ProductCall(leaf, product, tensors[0]), tape, properties.depth, inputs
        )
        return output
    if looks_up(leaf, forward, tensors):
        (output,) = connect_call(LookupCall(leaf, tensors[0]), tape, properties.depth, [])
        return output
    return _cut_out(leaf, properties, forward, tape, tensors, args, named)


def _tensors_in_arguments(
    leaf: Leaf, parameters: Sequence[Tensor], args: tuple[Nest, ...], named: dict[str, Nest]
) -> Sequence[Tensor]:
    """Returns the tensors among the arguments of a leaf layer's call.

    Raises:
        CannotWait: The weight gradients of the call cannot wait.
    """
    if recompute.is_in_piece():
        # A call on the tape would keep inputs and outputs, which recompute must free.
        raise CannotWait
    # recompute(use_reentrant=False) runs its layers within saved_tensors_hooks.
    if not saves_freely() or not has_parameters_alone(leaf.layer, parameters):
        raise CannotWait
    if len(args) == 1 and not named and isinstance(args[0], paddle.Tensor):
        return [args[0]]
    return tensors_in((args, named))


def _cut_out(
    leaf: Leaf,
    properties: CallProperties,
    forward: Callable[..., Nest],
    tape: Tape,
    tensors: Sequence[Tensor],
    args: tuple[Nest, ...],
    named: dict[str, Nest],
) -> Nest:
    """Runs a leaf layer's ``forward`` in a graph of its own, so that its weight gradients can wait.

    The result is connected to the graph around the call. ``tensors`` are those in ``args`` and
    ``named``, the arguments of the call.
    """
    differentiable_inputs = list(filter(needs_gradient, tensors))
    stand_ins = leaves_like(differentiable_inputs)
    output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
    outputs = list(filter(needs_gradient, tensors_in(output)))
    if not outputs:
        return output
    pairs = zip(differentiable_inputs, properties.reached)
    reached_inputs = [tensor for tensor, reached in pairs if reached]
    leaves = [stand_ins[id(tensor)] for tensor in reached_inputs]
    parameters = [p for p in leaf.parameters if not p.stop_gradient]
    call = GraphCall(leaf, parameters, leaves, outputs)
    connected = connect_call(call, tape, properties.depth, reached_inputs)
    return replace(output, {id(output): tensor for output, tensor in zip(outputs, connected)})
