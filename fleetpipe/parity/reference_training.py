"""Trains the reference on the batch that a pipeline trains on, all replicas' parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import PipelineParallel, random_keys, tensor_parallel, weighted
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.parity.reference import Reference, sum_in_order
from fleetpipe.transport import SoleGroup


class Beside:
    """A reference that is given a pipeline's batches."""

    def __init__(self, pipeline: PipelineParallel, reference: Reference) -> None:
        """Takes both.

        Args:
            pipeline: The wrapped model.
            reference: The single-device side.
        """
        self._pipeline, self._reference = pipeline, reference

    def train(self, everyone: MicroBatches, weights: Sequence[Fraction] | None = None) -> Nest:
        """Runs the micro-batches of all replicas; the gradients stand on the parameters.

        Args:
            everyone: The micro-batches, one replica's after another's.
            weights: Those of one replica's micro-batches; None for the usual ones.

        Returns:
            The loss of the batch, or a list of several.
        """
        pipeline, replicas = self._pipeline, self._pipeline.replicas.ranks
        usual, reported = pipeline.weights_in_backward, pipeline.weights[0]
        count = len(usual)
        losses, gradients = [], []
        # Replica by replica, as they add up: the sum of two has the bits of the pipeline's.
        for first in range(0, replicas * count, count):
            inputs, labels = (part[first : first + count] for part in everyone)
            batches = MicroBatches(inputs, labels)
            losses.append(self.accumulate(batches, weights or usual, first))
            if replicas > 1:
                gradients.append(self._reference.take_gradients())
        if gradients:
            share = pipeline.weights_of_all_replicas[0] / usual[0]
            self._reference.add_up(gradients, share)
        self._reference.divide_gradients(usual[0] / reported)
        # Summed gradients are those of a summed loss; what is reported is a mean all the same.
        mean, undelayed = Fraction(1, replicas), reported / usual[0]
        totals = [
            weighted(sum_in_order([weighted(loss, undelayed) for loss in of_replicas]), mean)
            for of_replicas in zip(*losses)
        ]
        return totals if len(totals) > 1 else totals[0]

    def accumulate(
        self, batches: MicroBatches, weights: Sequence[Fraction], first: int
    ) -> list[Tensor]:
        """Runs the micro-batches of one replica, cut as the pipeline cuts them."""
        pipeline = self._pipeline
        functions: Sequence[Criterion] = pipeline.layers.loss_functions()
        return self._reference.accumulate(*batches, weights, first, pipeline.slicing, functions)


@contextmanager
def as_the_next_batch(keys: random_keys.Keys | None) -> Iterator[None]:
    """Has the reference draw what the pipeline will; the random state is as before then."""
    alone = SoleGroup()  # the keys are agreed on already
    keyed = random_keys.keyed(keys, alone)
    with random_keys.random_states_kept(), keyed, tensor_parallel.alone():
        yield
