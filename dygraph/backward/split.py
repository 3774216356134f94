"""Splits the backward of stages into I and W: keeps a tape of leaf calls for each micro-batch.

While a stage whose backward is split runs forward, :func:`run_leaf` replaces the ``forward`` of its
leaf layers. At all other times layers have their own forwards. Start with :class:`SplitBackward`.
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
    CannotWait,
    Leaf,
    Nature,
    examine,
    has_parameters_alone,
    leaves_of,
    situation,
    tensors_in,
)
from fleetpipe.dygraph.backward.leaf_call import Call, GraphCall, Refusals, Tape, put_border
from fleetpipe.dygraph.backward.linear_and_embedding import (
    LookupCall,
    ProductCall,
    looks_up,
    product_of,
)
from fleetpipe.dygraph.nest import has_gradient, leaves_like, replace
from fleetpipe.dygraph.random_keys import in_earlier_backward
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.extras import extra
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import saves_freely
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import MicroBatch, flatten

#: ``forward(*args, **named)`` of one layer.
Forward = Callable[..., Nest]

_MISSING = object()

_NOTHING = nullcontext()


class _Replacement:
    """Replaces the forwards of some layers, and restores them."""

    def __init__(self, forwards: Iterable[tuple[Layer, Forward]]) -> None:
        self._forwards = list(forwards)
        self._before: list[tuple[Layer, object]] = []

    def begin(self) -> None:
        for layer, forward in self._forwards:
            # Not by Layer.__setattr__, which looks for parameters first.
            self._before.append((layer, layer.__dict__.get("forward", _MISSING)))
            layer.__dict__["forward"] = forward

    def require_in_place(self) -> None:
        """Refuses a forward that the user has set meanwhile, since restoring would remove it."""
        for layer, forward in self._forwards:
            if layer.__dict__.get("forward", forward) is not forward:
                raise ConfigError(
                    f"the forward of a layer was replaced while its stage ran: {type(layer)}",
                    fix="replace it before the batch",
                )

    def end(self) -> None:
        while self._before:
            layer, forward = self._before.pop()
            if forward is _MISSING:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


@contextmanager
def with_forwards(forwards: Iterable[tuple[Layer, Forward]]) -> Iterator[None]:
    """While it is open, each layer has the forward that it is paired with."""
    replacement = _Replacement(forwards)
    changes.append(replacement)
    try:
        replacement.begin()
        yield
        replacement.require_in_place()
    finally:
        changes.remove(replacement)
        replacement.end()


class SplitBackward:
    """The tapes of all stages and micro-batches whose backward a schedule splits."""

    def __init__(self, schedule: Schedule, layers_of: LayersOf, fast_leaves: bool = True) -> None:
        """Finds the stages and micro-batches whose backward is split.

        Args:
            schedule: The schedule; its actions I tell which backwards are split.
            layers_of: Returns the layers of a stage of this process.
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
        #: Whether the caller removes gradients from the parameters after each action.
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
        """Ends a batch: removes the hooks of the first batch, and drops unfinished tapes."""
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
        """While it is open, the stage's leaf layers run with replaced forwards.

        If the backward is split, these cut the calls out of the graph; otherwise they are faster
        forwards.

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
        """While it is open, layers that run again in a full backward have faster forwards."""
        if (stage, micro_batch) in self._split:
            return _NOTHING
        fast = self._fast[stage] if stage in self._fast else self._find_fast(stage)
        return _NOTHING if fast is None else fast.in_backward(self._sums)

    def _find_fast(self, stage: int) -> Any:
        """Finds and stores the faster forwards of a stage; None if no layer has one."""
        fast = None
        if self._fast_leaves:
            layers = (leaf.layer for leaf in self._leaves_of(stage) if not leaf.static)
            fast = extra("fast_leaves").fast_forwards_of(layers)
        self._fast[stage] = fast
        return fast

    @contextmanager
    def input_grads(self, stage: int, micro_batch: MicroBatch) -> Iterator[None]:
        """While it is open, autograd computes no weight gradients of leaf layers."""
        tape = self._tapes[stage, micro_batch]
        for (of, number), earlier in self._tapes.items():
            if of == stage and not self.by_name:
                # This micro-batch's gradients of uncut layers come after the earlier delayed ones.
                with in_earlier_backward(micro_batch - number):
                    self._add_now(earlier, tape.uncut)
        tape.in_backward = self._refusals.in_backward = True
        with self._noting(stage, "I"), self.recording(stage, micro_batch):
            yield
        tape.in_backward = self._refusals.in_backward = False
        # Autograd has just added the gradients of these layers' uncut calls.
        self._add_now(tape, tape.uncut)

    def weight_grads(self, stage: int, micro_batch: MicroBatch) -> None:
        """Computes the gradients that I has delayed, and adds them to those of the parameters."""
        tape = self._tapes[stage, micro_batch]
        with self._noting(stage, "W"), paddle.no_grad():
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
        """Adds the weight gradients of calls of one micro-batch; autograd must be off."""
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
        """Drops the tape of a stage and micro-batch."""
        self._tapes.pop((stage, micro_batch), None)

    def refusal(self) -> FleetPipeError | None:
        """Returns the stored error of a border, or None; forgets the error."""
        refusal, self._refusals.error = self._refusals.error, None
        return refusal

    def reordered(self) -> list[str]:
        """Returns the leaf layers whose gradients may be added in another order than in B.

        The inputs and outputs of such a layer are connected by several paths, or its parameters are
        also used outside of it.
        """
        both = set() if self.arrivals is None else self.arrivals.halves()
        return [
            leaf.name
            for leaves in self._leaves.values()
            for leaf in leaves
            if not all(nature.straight for nature in leaf.natures.values())
            or not both.isdisjoint(map(id, leaf.parameters))
        ]

    def _leaves_of(self, stage: int) -> list[Leaf]:
        """Returns the leaf layers of a stage, each once."""
        if stage not in self._leaves:
            # Several entries of the stage may share a layer.
            leaves: dict[int, Leaf] = {}
            for index, layer in self._layers_of(stage).items():
                for leaf in leaves_of(index, layer):
                    leaves.setdefault(id(leaf.layer), leaf)
            self._leaves[stage] = list(leaves.values())
        return self._leaves[stage]

    def _noting(self, stage: int, kind: str) -> AbstractContextManager[None]:
        """While it is open, records which gradients an action of the first batch adds."""
        if self.arrivals is None:
            self.arrivals = GradientArrivals()
        return self.arrivals.during(stage, kind, self._layers_of)


def run_leaf(
    leaf: Leaf, forward: Callable[..., Nest], tape: Tape, /, *args: Nest, **named: Nest
) -> Nest:
    """Calls a leaf layer's forward so that its weight gradients can wait, if they can.

    Args:
        leaf: The layer.
        forward: The layer's forward.
        tape: The tape to which backward adds the call.
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
        taken = _tensors_taken(leaf, parameters, args, named)
    except CannotWait:
        tape.uncut.add(leaf)
        return forward(*args, **named)
    key = situation(taken, parameters)
    nature = leaf.natures.get(key)
    if nature is None:
        nature = examine(parameters, forward, args, named)
        leaf.learn(key, nature)
    # All calls of a layer wait or none: autograd adds up all uses before it changes the parameter's
    # gradient.
    if not leaf.divisible:
        tape.uncut.add(leaf)
        return forward(*args, **named)
    if (product := product_of(leaf, forward, taken)) is not None:
        entries = [tensor for tensor in taken if not tensor.stop_gradient]
        (output,) = put_border(ProductCall(leaf, product, taken[0]), tape, nature.depth, entries)
        return output
    if looks_up(leaf, forward, taken):
        (output,) = put_border(LookupCall(leaf, taken[0]), tape, nature.depth, [])
        return output
    return _cut_out(leaf, nature, forward, tape, taken, args, named)


def _tensors_taken(
    leaf: Leaf, parameters: Sequence[Tensor], args: tuple[Nest, ...], named: dict[str, Nest]
) -> Sequence[Tensor]:
    """Returns the tensors among the arguments of a leaf layer's call.

    Raises:
        CannotWait: The weight gradients of the call cannot wait.
    """
    if recompute.in_piece():
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
    nature: Nature,
    forward: Callable[..., Nest],
    tape: Tape,
    taken: Sequence[Tensor],
    args: tuple[Nest, ...],
    named: dict[str, Nest],
) -> Nest:
    """Runs ``forward`` on stand-ins for its arguments, and replaces its graph by a border."""
    tensors = list(filter(has_gradient, taken))
    stand_ins = leaves_like(tensors)
    output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
    outputs = list(filter(has_gradient, tensors_in(output)))
    if not outputs:
        return output
    entries = [tensor for tensor, reached in zip(tensors, nature.reached) if reached]
    inputs = [stand_ins[id(tensor)] for tensor in entries]
    parameters = [p for p in leaf.parameters if not p.stop_gradient]
    call = GraphCall(leaf, parameters, inputs, outputs)
    borders = put_border(call, tape, nature.depth, entries)
    return replace(output, {id(output): border for output, border in zip(outputs, borders)})
