"""Trains a reference with the batches of a pipeline, as many replicas as that has."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import (
    PipelineParallel,
    SingleModel,
    random_keys,
    tensor_parallel,
    weighted,
)
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import UnitStates
from fleetpipe.dygraph.gradients import cause_of_backward, dense, drop_gradients
from fleetpipe.dygraph.layer_kinds import fill_gradients
from fleetpipe.dygraph.sums.gradient_trees import GradientTrees
from fleetpipe.dygraph.sums.uses import Uses
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import paddle
from fleetpipe.parity.cutting import copy_of
from fleetpipe.parity.outputs import backward_running
from fleetpipe.parity.reference import Reference, sum_in_order
from fleetpipe.schedules.action import GlobalMicroBatch


class Beside:
    """Trains a reference with the batches of a pipeline."""

    def __init__(self, pipeline: PipelineParallel, reference: Reference) -> None:
        self._pipeline, self._reference = pipeline, reference

    def train(
        self,
        everyone: MicroBatches,
        weights: Sequence[Fraction] | None = None,
        by_micro_batch: bool = False,
    ) -> Nest:
        """Trains the micro-batches of all replicas; the gradients are left on the parameters.

        Args:
            everyone: The micro-batches of all replicas, one replica after another.
            weights: The weights of one replica's micro-batches; None takes the usual ones.
            by_micro_batch: As ``return_micro_batch_loss`` of ``train_batch``.

        Returns:
            The loss of the batch; a list if there are several loss functions.
        """
        pipeline, replicas = self._pipeline, self._pipeline.replicas.ranks
        if pipeline.sums_by_tree:
            return self._train_by_tree(everyone, weights, by_micro_batch)
        usual, reported = pipeline.weights_in_backward, pipeline.weights[0]
        count, parameters = len(usual), self._reference.model.parameters()
        units = pipeline.units.count if by_micro_batch else 0
        losses, gradients = [], []
        by_tokens = pipeline.token_weights(everyone.labels, SoleGroup()) if not weights else None
        # Replica by replica, as they add up: the sum of two has the bits of the pipeline's.
        for first in range(0, replicas * count, count):
            batches = MicroBatches(*(part[first : first + count] for part in everyone))
            if by_tokens:  # of all; those of a replica are averaged with the others'
                weights = [weight * replicas for weight in by_tokens[first : first + count]]
            shares = self.accumulate(batches, weights or usual, first)
            losses.append([_sum_shares(of_function, units) for of_function in shares])
            if replicas > 1:
                gradients.append(
                    [None if p.grad is None else dense(p.grad, p).clone() for p in parameters]
                )
                drop_gradients(parameters)
        share = pipeline.weights_of_all_replicas[0] / usual[0]
        # What delay_scale_loss divides after backward.
        delayed = int(usual[0] / reported)
        with paddle.no_grad():
            for parameter, of_replicas in zip(parameters, zip(*gradients)):
                parts = [weighted(grad, share) for grad in of_replicas if grad is not None]
                if parts:
                    parameter.grad = sum_in_order(parts)
            for parameter in parameters if delayed != 1 else ():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / delayed
        # Summed gradients are those of a summed loss; what is reported is a mean all the same.
        mean = Fraction(1, replicas)
        undelayed = Fraction(1) if by_micro_batch else reported / usual[0]
        totals = [
            weighted(sum_in_order([weighted(loss, undelayed) for loss in of_replicas]), mean)
            for of_replicas in zip(*losses)
        ]
        return totals if len(totals) > 1 else totals[0]

    def _train_by_tree(
        self, everyone: MicroBatches, weights: Sequence[Fraction] | None, by_micro_batch: bool
    ) -> Nest:
        """Does the same with sums by trees, which know no replicas."""
        pipeline, replicas = self._pipeline, self._pipeline.replicas.ranks
        usual = pipeline.weights_of_all_replicas
        if weights:
            share = usual[0] / pipeline.weights_in_backward[0]
            usual = [weight * share for weight in weights] * replicas
        else:
            usual = pipeline.token_weights(everyone.labels, SoleGroup()) or usual
        model = self._reference.model
        if isinstance(model, SingleModel):
            uses = model.begin_uses()
        else:  # a user's own, which counts as one use of each of its parameters
            uses = Uses({0: {0: model.parameters()}}, lambda _number, _parameter: (), ())
        shares = self.accumulate(everyone, usual, 0, GradientTrees(uses, len(usual)))
        if by_micro_batch:
            count = len(usual) // replicas
            shares = [
                [tree(of_function[n::count], operator.add) for n in range(count)]
                for of_function in shares
            ]
            totals = [paddle.stack([one.reshape([]) for one in of_one]) for of_one in shares]
        else:
            totals = [tree(of_function, operator.add) for of_function in shares]
        # Summed gradients are those of a summed loss; what is reported is a mean all the same.
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

        Under the keys of a batch (``random_keys.under_keys``) micro-batch 0 has the random stream
        of the global micro-batch ``first``, and so on. The units of a micro-batch run forward one
        after another, and backward in reverse, as in a stage. The pipeline's loss functions
        set the weight of a unit in the loss. ``trees`` sum the gradients, if they are given.

        Returns:
            For each loss function, the share of each unit in the loss of the batch; the gradients
            are on the parameters.
        """
        reference, units = self._reference, self._pipeline.units
        reference.train()
        functions: Sequence[Criterion] = self._pipeline.layers.loss_functions()
        weight_of = units.weight_of(functions, batches, lambda _, number: weights[number])
        states = units.states()
        keys = random_keys.current()
        shares: list[list[Tensor]] = []
        for number, (value, label) in enumerate(zip(*units.cut(batches))):
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(first * units.count + number)
            with states.forward(0, number):
                # Of copies, for the same micro-batches may run again.
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
    """Runs the backward of a unit from its first loss, and detaches all its losses."""
    try:
        with states.backward(0, number) as (kept, grads):
            paddle.autograd.backward([losses[0], *kept], [None, *grads])
        states.release(0, number)
    except Exception as error:
        raise cause_of_backward(error)  # noqa: B904 (the error itself, or its cause)
    losses[:] = [loss.detach() for loss in losses]


def _sum_shares(shares: Sequence[Tensor], units: int) -> Tensor:
    """Returns the sum of shares; with ``units`` the sums of each so many, [micro-batches]."""
    if not units:
        return sum_in_order(shares)
    starts = range(0, len(shares), units)
    sums = [sum_in_order(shares[start : start + units]) for start in starts]
    return paddle.stack([one.reshape([]) for one in sums])


@contextmanager
def as_the_next_batch(keys: random_keys.Keys | None) -> Iterator[None]:
    """While it is open, random numbers are those of the pipeline's next batch."""
    alone = SoleGroup()  # the keys are agreed on already
    keyed = random_keys.under_keys(keys, alone)
    with random_keys.random_states_kept(), keyed, tensor_parallel.alone():
        yield
