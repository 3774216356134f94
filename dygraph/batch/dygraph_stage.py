"""The dynamic-graph stage: runs forwards and backwards of a model's stages with autograd.

The protocols of its arguments are in ``stage_interfaces.py``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, NoReturn

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.added_gradients import Crossing, crossing_of
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import require_nothing_kept
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage_interfaces import (
    Batch,
    RunOf,
    StageHooks,
    StagesToRun,
    StageWatch,
)
from fleetpipe.dygraph.batch.units import WHOLE, Borders, Units, UnitStates, borders_of
from fleetpipe.dygraph.gradients import explain_backward_error
from fleetpipe.dygraph.nest import copy_tensors, differentiable, leaf_like, map_tensors
from fleetpipe.dygraph.sums import GradientTrees
from fleetpipe.engine.stage import Values
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api.meta_parallel import WeightGradStore
from fleetpipe.paddle_api.tensor import copy_of, run_backward
from fleetpipe.schedules import Edge, Placement, Schedule
from fleetpipe.schedules.action import GlobalMicroBatch, MicroBatch

_NO_BATCH = Batch(MicroBatches(None, None))
_NOTHING = nullcontext()
#: The context of a backward that starts from the outputs alone: no other tensors, no gradients.
_NO_EXTRA_ROOTS: AbstractContextManager[tuple[Sequence[Tensor], Sequence[Tensor]]] = nullcontext(
    ((), ())
)
#: Returns ``tensor.grad``, for each received tensor; faster than a Python function.
_get_gradient = operator.attrgetter("grad")


class _ForwardValues(NamedTuple):
    """The values that a stage saves in a forward for the backward of the same micro-batch.

    Attributes:
        value: The value that the layers took.
        output: The value that the layers returned, or the loss.
        received: For each edge into the stage, the tensors of its value that need a gradient.
        sent: For each edge out of the stage, the tensors of its value that need a gradient.
    """

    value: Nest
    output: Nest
    received: Mapping[Edge, list[Tensor]]
    sent: dict[Edge, list[Tensor]]


class DygraphStage:
    """Implements the engine's ``Stage`` for the stages of a ``PipelineLayer``.

    A stage saves its inputs and outputs from forward to backward. Received tensors that need a
    gradient are leaves of the graph, so autograd ends where the stage begins.
    """

    def __init__(
        self,
        run_of: RunOf,
        placement: Placement,
        split: SplitBackward,
        borders: Borders | None = None,
    ) -> None:
        """Creates an object that runs all stages of this process.

        Args:
            run_of: ``run_of(stage)(value, micro_batch)`` runs the layers of a stage.
            placement: The owner of each stage, a rank.
            split: Splits backwards into I and W.
            borders: Translates between the values of layers and those on edges; None for a list of
                layers, by ``placement``.
        """
        # Called once for each stage in a batch.
        self._run_of = functools.cache(run_of)
        self.split = split
        self._last = placement.stages - 1
        self._borders = borders or borders_of(placement)
        #: The values of forwards whose backward has not run, by stage and global micro-batch.
        self._saved: dict[tuple[int, int], _ForwardValues] = {}
        self._batch = _NO_BATCH
        self._hooks: StageHooks | None = None
        self._trees: GradientTrees | None = None
        self._first_micro_batch = 0
        #: Whether any loss so far had a gradient, and how many losses of this batch had none.
        self._had_gradient, self._constant_losses = False, 0
        #: The states between the sequence chunks of this batch; None if it has none.
        self._units: UnitStates | None = None
        self._crossings: dict[int, Crossing] | None = None
        #: Finds stages that use values of other stages; None if there is nothing to find.
        self.watch: StageWatch | None = None
        #: ``watch``, if it has anything to do in this batch; None otherwise.
        self._watch_of_batch: StageWatch | None = None
        #: The number in the batch of the micro-batch whose forward runs, or runs next.
        self.micro_batch_id = 0

    @classmethod
    def of(
        cls,
        stages: StagesToRun,
        schedule: Schedule,
        fast_leaves: bool = True,
        run_of: RunOf | None = None,
    ) -> DygraphStage:
        """Creates the stage object for the stages of a process under a schedule.

        Args:
            stages: The stages of this process: an ``OwnedStages`` of its model.
            schedule: The schedule, which may split backwards.
            fast_leaves: Whether layers may have faster forwards, with the same bits, where a
                backward is not split (the option ``fast_leaves``).
            run_of: ``run_of(stage)(value, micro_batch)`` runs the layers of a stage; None for
                ``stages.function``.
        """
        split = SplitBackward(schedule, stages.layers, fast_leaves)
        return cls(run_of or stages.function, schedule.placement, split, stages.borders)

    def begin(
        self,
        batch: Batch,
        first_micro_batch: int = 0,
        hooks: StageHooks | None = None,
        units: Units = WHOLE,
        trees: GradientTrees | None = None,
    ) -> None:
        """Starts a batch.

        Args:
            batch: The batch.
            first_micro_batch: The global number of its micro-batch 0.
            hooks: The functions to call around its forwards and backwards.
            units: Cuts micro-batches into sequence chunks. If it does, methods take the number of
                a chunk wherever they say micro-batch.
            trees: Sums the gradients of the micro-batches; None lets autograd add them up.
        """
        self._batch = batch
        self._trees = trees
        self._units = None if units is WHOLE else units.states()
        self._run_of.cache_clear()
        watches = self.watch is not None and self.watch.watches
        self._watch_of_batch = self.watch if watches else None
        self._hooks = hooks
        self._first_micro_batch = first_micro_batch
        self._constant_losses = 0
        self.micro_batch_id = 0

    def end(self) -> None:
        """Drops the batch and all values saved for it, whether the batch is finished or not."""
        self._batch = _NO_BATCH
        self._hooks = self._trees = None
        self._units = None
        self._saved.clear()
        self.split.end()

    def forward(self, stage: int, micro_batch: GlobalMicroBatch, inputs: Values) -> Values:
        """Runs F: the layers of ``stage``; the last stage also computes the loss.

        Args:
            stage: The global number of the stage.
            micro_batch: The global number of the micro-batch.
            inputs: The received values by edge; stage 0 takes the inputs of the batch instead.

        Returns:
            The value to send on each edge.
        """
        if self._watch_of_batch is not None:
            self._watch_of_batch.enter(stage, True)
        number = self.micro_batch_id = self._number_in_batch(micro_batch)
        received: dict[Edge, Nest] = {}
        leaves: dict[Edge, list[Tensor]] = {}
        for edge, received_value in inputs.items():
            # A value from another stage of this rank may come with its graph, or be a leaf of that
            # stage: a parameter, or a received tensor that it returns unchanged. This stage's
            # gradients must not be added to the gradients of that leaf.
            received[edge] = leaf_value = map_tensors(leaf_like, received_value)
            # Before the layers run: they may set stop_gradient of a tensor after its use.
            leaves[edge] = differentiable(leaf_value)
        value = self._borders.join(received) if stage else self._batch.data.inputs[number]
        if self._hooks is not None:
            self._hooks.before_forward(stage, value)
        outputs: dict[Edge, Nest] = {}
        sent: dict[Edge, list[Tensor]] = {}
        try:
            in_unit = _NOTHING if self._units is None else self._units.forward(stage, number)
            with self.split.recording(stage, number), in_unit:
                output = self._run_of(stage)(value, micro_batch)
            if self._hooks is not None:
                self._hooks.after_forward(stage, value, output)
            if stage == self._last:
                output = self._compute_losses(number, output)
            else:
                labels = self._batch.data.labels
                labels = None if labels is None else labels[number]
                for edge, edge_value in self._borders.split(stage, output, labels).items():
                    outputs[edge] = map_tensors(_prepare_to_send, edge_value)
                    sent[edge] = differentiable(outputs[edge])
        except Exception:
            self._raise_error_of_split()
            raise
        if self._batch.elsewhere:
            require_nothing_kept(self._batch.elsewhere, stage)
        self._saved[stage, micro_batch] = _ForwardValues(value, output, leaves, sent)
        self.micro_batch_id += 1
        return outputs

    def _raise_error_of_split(self) -> None:
        """Raises the error of our split backward, if Paddle has raised another in its place."""
        refusal = self.split.refusal()
        if refusal is not None:
            raise refusal from None

    def backward(self, stage: int, micro_batch: GlobalMicroBatch, output_grads: Values) -> Values:
        """Runs B: autograd from the outputs, or from the loss, back to the received tensors.

        Args:
            stage: The global number of the stage.
            micro_batch: The global number of the micro-batch.
            output_grads: For each edge out of the stage, the gradients of the tensors on it that
                need one.

        Returns:
            For each edge into the stage, the gradients to send back.
        """
        if self._watch_of_batch is not None:
            self._watch_of_batch.enter(stage, False)
        random_keys.enter_backward(micro_batch)
        number = self._number_in_batch(micro_batch)
        value, output, received, sent = self._saved[stage, micro_batch]
        # The tensors that the stage sent, and the gradient that came back for each of them.
        outputs: list[Tensor] = []
        incoming: list[Tensor] = []
        # In a model without stages, autograd adds gradients in this order: the last consumer first.
        for edge in reversed(sent):
            outputs += sent[edge]
            incoming += output_grads[edge]
        arrived = None if stage == self._last else tuple(incoming)
        if self._hooks is not None:
            self._hooks.before_backward(stage, value, output, arrived)
        if arrived is not None:
            self._run_backward(stage, number, *_join_equal_roots(outputs, arrived))
        elif output.stop_gradient:
            # One micro-batch may have a constant loss, as if all its labels are masked.
            self._constant_losses += 1
            if not self._had_gradient and self._constant_losses == len(
                self._batch.data.labels or ()
            ):
                _refuse_constant_loss()
        else:
            self._had_gradient = True
            self._run_backward(stage, number, [output], [None])
        if WeightGradStore.cache:
            # A schedule of Paddle's would add them later, but in the same order and so with the
            # same bits.
            WeightGradStore.flush()
            WeightGradStore.pop()
        if self._crossings is not None:
            self._crossings[stage] = crossing_of(differentiable(value), differentiable(output))
        grads: dict[Edge, tuple[Tensor, ...]] = {}
        for edge, leaves in received.items():
            grads[edge] = tuple(map(_get_gradient, leaves))
        if self._hooks is not None:
            of_all_edges = tuple(grad for of_edge in grads.values() for grad in of_edge)
            input_grads = of_all_edges if stage else None
            self._hooks.after_backward(stage, value, output, arrived, input_grads)
        if self._trees is not None and not self.split.splits(stage, number):
            self._trees.take(stage, number, complete=True)
        return grads

    def input_grad(self, stage: int, micro_batch: GlobalMicroBatch, output_grads: Values) -> Values:
        """Runs I: like :meth:`backward`, but the weight gradients of leaf layers wait for W.

        Afterwards only the values that W needs are saved. The arguments and the result are those of
        :meth:`backward`.
        """
        number = self._number_in_batch(micro_batch)
        with self.split.input_grads(stage, number):
            grads = self.backward(stage, micro_batch, output_grads)
        if self._trees is not None:
            self._trees.take(stage, number, complete=False)
        del self._saved[stage, micro_batch]
        return grads

    def weight_grad(self, stage: int, micro_batch: GlobalMicroBatch) -> None:
        """Runs W: computes and adds the weight gradients that :meth:`input_grad` has delayed."""
        if self._watch_of_batch is not None:
            self._watch_of_batch.enter(stage, False)
        if self._hooks is not None:
            self._hooks.before_weight_grad(stage)
        random_keys.enter_backward(micro_batch)
        number = self._number_in_batch(micro_batch)
        self.split.weight_grads(stage, number)
        if self._trees is not None:
            self._trees.take(stage, number, complete=True)

    def release(self, stage: int, micro_batch: GlobalMicroBatch) -> None:
        """Drops all values that are saved for a stage and micro-batch."""
        self._saved.pop((stage, micro_batch), None)
        number = self._number_in_batch(micro_batch)
        if self._units is not None:
            self._units.release(stage, number)
        self.split.release(stage, number)

    @contextmanager
    def noting_crossings(self) -> Iterator[dict[int, Crossing]]:
        """A context in which each backward records which inputs of a stage reach which outputs.

        Yields:
            The crossing of each stage in the last micro-batch, by stage.
        """
        self._crossings = {}
        try:
            yield self._crossings
        finally:
            self._crossings = None

    def _run_backward(
        self,
        stage: int,
        number: MicroBatch,
        tensors: list[Tensor],
        grads: list[Tensor | None],
    ) -> None:
        """Runs autograd from ``tensors``, and from values kept for later sequence chunks.

        Args:
            stage: The global number of the stage.
            number: The number of the micro-batch in the batch.
            tensors: The outputs of the stage, or its loss.
            grads: The gradient of each; None for 1.
        """
        in_unit = _NO_EXTRA_ROOTS if self._units is None else self._units.backward(stage, number)
        try:
            with self.split.in_backward(stage, number), in_unit as (later, later_grads):
                # Later sequence chunks have sent gradients to tensors that this one keeps for them.
                roots = [*tensors, *later]
                if roots:
                    run_backward(roots, [*grads, *later_grads])
        except Exception as error:
            cause = explain_backward_error(recompute.cause_of(error))
            self._raise_error_of_split()
            raise cause  # noqa: B904

    def _number_in_batch(self, micro_batch: GlobalMicroBatch) -> MicroBatch:
        """Returns the number of a micro-batch in this process's batch, from 0."""
        return MicroBatch(micro_batch - self._first_micro_batch)

    def _compute_losses(self, index: MicroBatch, output: Nest) -> Nest:
        """Computes the losses of the last stage's output.

        Args:
            index: The number of the micro-batch in the batch.
            output: The output of the model's last layer.

        Returns:
            The loss from which backward starts, scaled if the batch has a scale. In a batch without
            losses, which is no training, it is ``output`` itself, which the batch stores.
        """
        batch = self._batch
        if batch.losses is None:
            batch.collect(index, output)
            return output
        random_keys.enter_loss(batch.losses.functions)
        loss = batch.losses.take(index, output, copy_tensors(batch.data.labels[index]))
        return loss if batch.scale is None else batch.scale(loss)


def _refuse_constant_loss() -> NoReturn:
    """Refuses a batch in which no loss has a gradient."""
    raise BoundaryError(
        "the loss does not depend on any parameter that is trained",
        where="last stage, in all micro-batches of the first batch",
        cause="loss_fn detached its argument, or every parameter has stop_gradient=True; or all "
        "labels of the batch are masked, and loss_fn returns a constant for them",
        fix="compute the loss from the output as it is, as output.sum() * 0 where nothing counts, "
        "and train at least one parameter",
    )


def _prepare_to_send(tensor: Tensor) -> Tensor:
    """Returns a tensor to send: a copy if it needs no gradient.

    Such a tensor may be a buffer, which the next micro-batch may change before it is sent.
    """
    return copy_of(tensor) if tensor.stop_gradient else tensor


def _join_equal_roots(
    tensors: list[Tensor], grads: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the tensors from which backward starts, each once, and their gradients.

    Args:
        tensors: Sent tensors, of which some may appear several times.
        grads: The gradient of each, to be added up for a tensor that appears several times; None
            if the next stage did not use the tensor, which is left out.
    """
    if len(tensors) == len(grads) == 1 and grads[0] is not None:
        return tensors, [grads[0]]
    roots: dict[int, tuple[Tensor, Tensor]] = {}
    for tensor, grad in zip(tensors, grads):
        # Paddle would replace None by ones.
        if grad is not None:
            _, earlier = roots.get(id(tensor), (tensor, None))
            roots[id(tensor)] = (tensor, grad if earlier is None else earlier + grad)
    return [tensor for tensor, _ in roots.values()], [grad for _, grad in roots.values()]
