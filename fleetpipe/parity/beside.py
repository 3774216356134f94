"""Trains a reference, the model on one device, with the batches of all replicas of a pipeline.

Start with ``ReferenceTrainer``. Batches are cut into micro-batches by code of its own, as a check
of the pipeline's cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compare.differences import Difference, compare_numbers
from fleetpipe.dygraph import PipelineParallel, SingleModel, random_keys, tensor_parallel, weighted
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import UnitStates
from fleetpipe.dygraph.gradients import dense, drop_gradients, explain_backward_error
from fleetpipe.dygraph.layer_kinds import fill_gradients
from fleetpipe.dygraph.nest import map_tensors, rebuild
from fleetpipe.dygraph.sums import GradientTrees, Uses
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor
from fleetpipe.parity.recorded_values import backward_running
from fleetpipe.parity.reference import Reference, sum_in_order
from fleetpipe.schedules.action import GlobalMicroBatch


class RepeatedBatch:
    """A user's batch that can be passed to several calls.

    A preprocessor is called once; from an iterator, the items of exactly one step are taken.
    """

    def __init__(self, data: Any, count: int) -> None:
        """Takes a batch from the user's data.

        Args:
            data: Anything that ``train_batch`` takes.
            count: The number of items that a step takes from an iterator: ``accumulate_steps``.
        """
        self._count = count
        self._preprocessor = type(data) if isinstance(data, PipelineDatasetPreprocessor) else None
        data = data() if self._preprocessor else data
        self._is_iterator = hasattr(type(data), "__next__")
        self._data = list(islice(data, count)) if self._is_iterator else data
        self._taken = 0

    def repeat(self) -> Any:
        """Returns the batch once more, in the form of the user's data."""
        data = self._iterator() if self._is_iterator else self._data
        return self._preprocessor(lambda: data) if self._preprocessor else data

    def differences(self, step: int) -> list[Difference]:
        """Returns a difference if the pipeline took more or fewer items than one step has."""
        if not self._is_iterator:
            return []
        items = len(self._data)  # of one step
        return compare_numbers("micro-batch", "the iterator, taken", step, self._taken, items)

    def parts(self) -> tuple[Nest, Nest]:
        """Returns the inputs and the labels of the batch; lists if the data are an iterator."""
        if not self._is_iterator:
            return (None, None) if self._data is None else tuple(self._data)
        inputs, labels = map(list, zip(*self._data))
        return inputs, labels

    def micro_batches(self, size: int) -> MicroBatches:
        """Returns the micro-batches of the batch, of ``size`` rows each."""
        return MicroBatches(*(cut_value(part, size, self._count) for part in self.parts()))

    def _iterator(self) -> Iterator[Nest]:
        """Yields the items of the step, and counts how many the pipeline takes."""
        self._taken = 0
        for item in self._data:
            self._taken += 1
            yield item
        self._taken += 1  # the pipeline asks for one item too many


def cut_value(value: Nest, size: int, count: int) -> list[Nest] | None:
    """Returns the micro-batches of the inputs, or of the labels, of a batch.

    Args:
        value: The inputs or the labels of the whole batch.
        size: Rows of a micro-batch.
        count: The number of micro-batches. Each gets ``value`` itself if that has no tensor and no
            list.
    """
    if value is None:
        return None
    pieces = _cut_nest(value, size)
    return [value] * count if pieces is None else pieces


def shares_of_rows(value: Nest, size: int) -> list[Fraction] | None:
    """Returns the fraction of all rows in each micro-batch; None if the user cut the batch.

    Args:
        value: The labels of a batch.
        size: Rows of a micro-batch.
    """
    if isinstance(value, (tuple, dict)):
        of_parts = (shares_of_rows(part, size) for part in _items_of(value))
        return next((shares for shares in of_parts if shares), None)
    if not isinstance(value, paddle.Tensor):
        return None
    rows = value.shape[0]
    return [Fraction(min(size, rows - first), rows) for first in range(0, rows, size)]


def copy_of(value: Nest) -> Nest:
    """Returns a copy of a micro-batch, into which a model may write."""
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def _cut_nest(value: Nest, size: int) -> list[Nest] | None:
    """Returns the micro-batches of nested containers; None if there is no tensor and no list."""
    if isinstance(value, paddle.Tensor):
        return [copy_of(value[n : n + size]) for n in range(0, value.shape[0], size)]
    if isinstance(value, list):
        return [copy_of(item) for item in value]
    whole = _items_of(value)
    pieces = [_cut_nest(item, size) for item in whole]
    count = next((len(of_item) for of_item in pieces if of_item is not None), None)
    if count is None:
        return None
    items = [
        # An item without tensors goes into each micro-batch.
        [item if of_item is None else of_item[number] for of_item, item in zip(pieces, whole)]
        for number in range(count)
    ]
    if isinstance(value, dict):
        return [dict(zip(value, of_micro_batch)) for of_micro_batch in items]
    return [rebuild(value, of_micro_batch) for of_micro_batch in items]


def _items_of(value: Nest) -> list[Nest]:
    """Returns the items of a tuple or list, or the values of a dict; else an empty list."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


class ReferenceTrainer:
    """Trains a pipeline's reference, the model on one device, with the batches of the pipeline."""

    def __init__(self, pipeline: PipelineParallel, reference: Reference) -> None:
        """Takes a pipeline and the reference that is trained beside it."""
        self._pipeline, self._reference = pipeline, reference

    def train(
        self,
        everyone: MicroBatches,
        weights: Sequence[Fraction] | None = None,
        by_micro_batch: bool = False,
    ) -> Nest:
        """Runs the micro-batches of all replicas, and leaves the gradients on the parameters.

        Args:
            everyone: The micro-batches of all replicas, one replica after another.
            weights: The weights of one replica's micro-batches; None takes the pipeline's.
            by_micro_batch: Whether to return the loss of each micro-batch, as
                ``return_micro_batch_loss`` of ``train_batch``.

        Returns:
            The loss of the batch, the mean over the replicas, or the losses [micro-batches]; a list
            of these if there are several loss functions.
        """
        pipeline, replicas = self._pipeline, self._pipeline.replicas.ranks
        if pipeline.sums_by_tree:
            return self._train_by_tree(everyone, weights, by_micro_batch)
        # The weights of a replica's micro-batches in the loss that starts backward (each is 1 with
        # delay_scale_loss), and the weight of each in the loss that is reported.
        in_backward, reported = pipeline.weights_in_backward, pipeline.weights[0]
        count, parameters = len(in_backward), self._reference.model.parameters()
        # How many shares of the loss are summed to one number; 0 sums all of a replica.
        units = pipeline.units.count if by_micro_batch else 0
        losses, gradients = [], []  # by replica: of each loss function, and of each parameter
        by_tokens = pipeline.token_weights(everyone.labels, SoleGroup()) if not weights else None
        # Replica by replica, as the pipeline adds up: the sum of two has its bits.
        for first in range(0, replicas * count, count):
            batches = MicroBatches(*(part[first : first + count] for part in everyone))
            if by_tokens:  # these weights are shares of all replicas, whose gradients are averaged
                weights = [weight * replicas for weight in by_tokens[first : first + count]]
            shares = self.accumulate(batches, weights or in_backward, first)
            losses.append([_sum_shares(of_function, units) for of_function in shares])
            if replicas > 1:
                gradients.append(
                    [None if p.grad is None else dense(p.grad, p).clone() for p in parameters]
                )
                drop_gradients(parameters)
        # The share of a replica's gradient in the sum: 1 / replicas if gradients are averaged.
        share = pipeline.weights_of_all_replicas[0] / in_backward[0]
        # With delay_scale_loss gradients are divided after backward; otherwise this is 1.
        divisor = int(in_backward[0] / reported)
        with paddle.no_grad():
            for parameter, of_replicas in zip(parameters, zip(*gradients)):
                parts = [weighted(grad, share) for grad in of_replicas if grad is not None]
                if parts:
                    parameter.grad = sum_in_order(parts)
            for parameter in parameters if divisor != 1 else ():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / divisor
        # Gradients may be summed over the replicas; the reported loss is always their mean.
        mean = Fraction(1, replicas)
        # Turns a loss with the weights of backward into the reported one. The losses of single
        # micro-batches are reported as they are in backward.
        to_reported = Fraction(1) if by_micro_batch else reported / in_backward[0]
        totals = [
            weighted(sum_in_order([weighted(loss, to_reported) for loss in of_replicas]), mean)
            for of_replicas in zip(*losses)
        ]
        return totals if len(totals) > 1 else totals[0]

    def _train_by_tree(
        self, everyone: MicroBatches, weights: Sequence[Fraction] | None, by_micro_batch: bool
    ) -> Nest:
        """Trains as :meth:`train` does, but sums all replicas' micro-batches by binary trees.

        The arguments and the result are those of :meth:`train`.
        """
        pipeline, replicas = self._pipeline, self._pipeline.replicas.ranks
        # The weight of each micro-batch of all replicas in the loss that starts backward.
        in_backward = pipeline.weights_of_all_replicas
        if weights:
            share = in_backward[0] / pipeline.weights_in_backward[0]
            in_backward = [weight * share for weight in weights] * replicas
        else:
            in_backward = pipeline.token_weights(everyone.labels, SoleGroup()) or in_backward
        model = self._reference.model
        if isinstance(model, SingleModel):
            uses = model.begin_uses()
        else:  # a user's own model counts as one use of each of its parameters
            uses = Uses({0: {0: model.parameters()}}, lambda _number, _parameter: (), ())
        shares = self.accumulate(everyone, in_backward, 0, GradientTrees(uses, len(in_backward)))
        if by_micro_batch:
            count = len(in_backward) // replicas
            shares = [
                [tree(of_function[n::count], operator.add) for n in range(count)]
                for of_function in shares
            ]
            totals = [_stack(of_function) for of_function in shares]
        else:
            totals = [tree(of_function, operator.add) for of_function in shares]
        # Gradients may be summed over the replicas; the reported loss is always their mean.
        mean = pipeline.weights_in_backward[0] / pipeline.weights_of_all_replicas[0] / replicas
        totals = [weighted(total, mean) for total in totals]
        return totals if len(totals) > 1 else totals[0]

    def accumulate(
        self,
        batches: MicroBatches,
        weights: Sequence[Fraction],
        first: int,
        trees: GradientTrees | None = None,
    ) -> list[list[Tensor]]:
        """Runs all micro-batches forward and backward, one after another.

        A unit is what a stage runs at once: a micro-batch, or a chunk of its sequences. The units
        of a micro-batch run forward one after another, and backward in reverse. The pipeline's
        loss functions set the weight of a unit in the loss.

        Args:
            batches: The micro-batches.
            weights: The weight of each micro-batch in the loss.
            first: The global number of micro-batch 0, which selects the random stream under the
                keys of a batch (``random_keys.under_keys``).
            trees: The binary trees that sum the gradients; None sums them in the order of the
                micro-batches.

        Returns:
            For each loss function, the weighted losses of the units, which add up to the loss of
            the batch; the gradients are on the parameters.
        """
        reference, units = self._reference, self._pipeline.units
        reference.train()
        functions: Sequence[Criterion] = self._pipeline.layers.loss_functions()
        weight_of = units.weight_of(functions, batches, lambda _, number: weights[number])
        states = units.states()
        keys = random_keys.current_keys()
        shares: list[list[Tensor]] = []
        for number, (value, label) in enumerate(zip(*units.cut(batches))):
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(first * units.count + number)
            with states.forward(0, number):
                # Copies, since the same micro-batches may run again.
                losses = reference.losses_of(copy_of(value), copy_of(label))
            shares.append([weighted(loss, weight_of(i, number)) for i, loss in enumerate(losses)])
            if (number + 1) % units.count == 0:
                for last in range(number, number - units.count, -1):
                    _backward(states, last, shares[last])
                if trees is not None:
                    trees.take(0, number, complete=True)
        if trees is not None:
            trees.finish()
            trees.uses.end()
        parameters = {reference.names[n]: p for n, p in reference.model.named_parameters()}
        fill_gradients(parameters)
        drop_gradients(parameters[name] for name in parameters.keys() & reference.uncompared)
        return [list(of_function) for of_function in zip(*shares)]


@backward_running()
def _backward(states: UnitStates, number: int, losses: list[Tensor]) -> None:
    """Runs the backward of a micro-batch or sequence chunk; detaches its losses in the list.

    Args:
        states: What layers keep from one sequence chunk of a micro-batch for the next.
        number: The number of the micro-batch or chunk.
        losses: The losses, one for each loss function; backward starts from the first.
    """
    try:
        # Backward starts from tensors kept for later units too, with the gradients of those.
        with states.backward(0, number) as (kept, kept_grads):
            paddle.autograd.backward([losses[0], *kept], [None, *kept_grads])
        states.release(0, number)
    except Exception as error:
        raise explain_backward_error(error)  # noqa: B904 (the error itself, or its cause)
    losses[:] = [loss.detach() for loss in losses]


def _sum_shares(shares: Sequence[Tensor], units: int) -> Tensor:
    """Returns the batch's loss; with ``units`` the losses of the micro-batches, [micro-batches].

    Args:
        shares: What each micro-batch, or chunk of its sequences, adds to the loss.
        units: The number of chunks of a micro-batch, to sum each alone; 0 sums all.
    """
    if not units:
        return sum_in_order(shares)
    starts = range(0, len(shares), units)
    return _stack([sum_in_order(shares[start : start + units]) for start in starts])


def _stack(losses: Sequence[Tensor]) -> Tensor:
    """Joins losses of one number each to a tensor, [losses]."""
    return paddle.stack([loss.reshape([]) for loss in losses])


@contextmanager
def random_numbers_of_batch(keys: random_keys.Keys | None) -> Iterator[None]:
    """In this context, random numbers are those of the batch of ``keys``.

    Args:
        keys: The keys of the random numbers of a batch; before the pipeline runs the batch, its
            ``next_keys`` returns them. None if random numbers have no keys.
    """
    keyed = random_keys.under_keys(keys, SoleGroup())  # all ranks have these keys already
    with random_keys.random_states_kept(), keyed, tensor_parallel.alone():
        yield
