"""Trains a reference with the batches of a pipeline, as many replicas as that has."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import PipelineParallel, random_keys, tensor_parallel, weighted
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.sums.gradient_trees import GradientTrees
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import paddle
from fleetpipe.parity.reference import Reference, sum_in_order


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
        count = len(usual)
        units = pipeline.units.count if by_micro_batch else 0
        losses, gradients = [], []
        by_tokens = pipeline.token_weights(everyone.labels, SoleGroup()) if not weights else None
        # Replica by replica, as they add up: the sum of two has the bits of the pipeline's.
        for first in range(0, replicas * count, count):
            inputs, labels = (part[first : first + count] for part in everyone)
            batches = MicroBatches(inputs, labels)
            if by_tokens:  # of all; those of a replica are averaged with the others'
                weights = [weight * replicas for weight in by_tokens[first : first + count]]
            shares = self.accumulate(batches, weights or usual, first)
            losses.append([_sum_shares(of_function, units) for of_function in shares])
            if replicas > 1:
                gradients.append(self._reference.take_gradients())
        if gradients:
            share = pipeline.weights_of_all_replicas[0] / usual[0]
            self._reference.add_up(gradients, share)
        self._reference.divide_gradients(usual[0] / reported)
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
        trees = self._reference.begin_trees(len(usual))
        shares = self.accumulate(everyone, usual, 0, trees)
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
        """Trains some micro-batches, cut as the pipeline cuts them."""
        units = self._pipeline.units
        functions: Sequence[Criterion] = self._pipeline.layers.loss_functions()
        return self._reference.accumulate(*batches, weights, first, units, functions, trees)


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
