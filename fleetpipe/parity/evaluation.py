"""Compares the results of ``eval_batch`` and ``predict_batch`` with the single model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compare.differences import Difference, compare_values
from fleetpipe.dygraph import PipelineParallel, random_keys, weighted
from fleetpipe.dygraph.batch.micro_batches import counted_in
from fleetpipe.dygraph.batch.outputs import join_outputs
from fleetpipe.dygraph.optimizer.replicas import share_in_mean
from fleetpipe.job.job import mp_shard, pipeline_group
from fleetpipe.mesh.parts import parted
from fleetpipe.paddle_api import paddle
from fleetpipe.parity.beside import as_the_next_batch
from fleetpipe.parity.cutting import RepeatedBatch, cut, shares_of_rows
from fleetpipe.parity.outputs import (
    Outputs,
    compare_outputs,
    part_of,
    record_model,
    record_stages,
    sequence_parts,
)
from fleetpipe.parity.reference import Reference, sum_in_order
from fleetpipe.schedules.action import GlobalMicroBatch


class Evaluations:
    """Runs evaluations of a pipeline, and compares each with the reference's."""

    def __init__(self, pipeline: PipelineParallel, reference: Reference) -> None:
        self._pipeline = pipeline
        self._reference = reference

    def eval_batch(
        self, call: Callable[..., Any], step: int, data: Any, compute_loss: bool, *more: Any
    ) -> tuple[Nest, list[Difference]]:
        """Evaluates a batch on both sides; ``call`` is the pipeline's method. Collective.

        Returns:
            The result of the pipeline's call, and the differences on this rank.
        """
        batch = RepeatedBatch(data, self._pipeline.accumulate_steps)
        keys = self._pipeline.next_keys(training=False)
        with record_stages(self._pipeline.layers) as outputs:
            result = call(batch.again(), compute_loss, *more)
        inputs, labels, weights, counted = self._share_batches(*batch.parts())
        with self._evaluating(inputs, keys) as (values, expected):
            if compute_loss:
                reference = self._losses(values, labels, weights)
            else:
                reference = [self._reference.model(value) for value in values]
        differences = compare_outputs(outputs, expected, step, call_of=" of eval_batch")
        kind, name = "output", "eval_batch, micro-batch "
        if compute_loss:
            kind, name = "loss", "eval_batch"
            reference = self._mean_over_replicas(reference, counted)
            reference = reference if len(reference) > 1 else reference[0]
        elif not self._owns_last_stage:
            reference = []
        differences += compare_values(kind, name, step, result, reference, part_of)
        return result, differences

    def predict_batch(
        self, call: Callable[..., Any], step: int, inputs: Nest, broadcast: bool
    ) -> tuple[Nest, list[Difference]]:
        """Predicts on both sides; ``call`` is the pipeline's method. Collective.

        Returns:
            The result of the pipeline's call, and the differences on this rank.
        """
        keys = self._pipeline.next_keys(training=False)
        with record_stages(self._pipeline.layers) as outputs:
            result = call(inputs, broadcast)
        shared, *_ = self._share_batches(inputs, None)
        with self._evaluating(shared, keys) as (values, expected):
            reference_output = join_outputs([self._reference.model(value) for value in values])
        differences = compare_outputs(outputs, expected, step, call_of=" of predict_batch")
        reference_output = reference_output if broadcast or self._owns_last_stage else None
        differences += compare_values(
            "output", "predict_batch", step, result, reference_output, part_of
        )
        return result, differences

    @property
    def _owns_last_stage(self) -> bool:
        return self._pipeline.is_pipeline_last_stage(ignore_virtual=True)

    def _owner(self, stage: int) -> int:
        placement = self._pipeline.schedule.placement
        return placement.rank_of(stage % placement.stages)

    def _share_batches(
        self, inputs: Nest, labels: Nest
    ) -> tuple[list[Nest], list[Nest], list[Fraction], int]:
        """Gives every rank the micro-batches and their weights in the loss. Collective.

        The last item is this replica's count in the mean of all; 0 if all count alike.
        """
        pipeline, group, ranks = self._pipeline, pipeline_group(), sequence_parts()
        size, count = pipeline.micro_batch_size, pipeline.accumulate_steps
        parts = cut(inputs, size, count), cut(labels, size, count)
        values = group.broadcast(parts[0], self._owner(0))
        if ranks is not None:
            values = ranks.whole_batch(values)
        shares = [Fraction(1, len(values))] * len(values)
        if sum(pipeline.weights) != 1:
            weights = [Fraction(1)] * len(values)
        else:
            weights = shares_of_rows(labels, size) or shares
        # A message carries whole numbers, and no fractions.
        pairs = [[weight.numerator, weight.denominator] for weight in weights]
        counted = counted_in(labels) or len(values)
        labels, pairs, counted = group.broadcast((parts[1], pairs, counted), self._owner(-1))
        if ranks is not None:
            labels = ranks.whole_batch(labels)
        by_tokens = pipeline.token_weights(labels, pipeline.replicas) if labels else None
        counts = not by_tokens and sum(pipeline.weights) == 1
        weights = by_tokens or [Fraction(*pair) for pair in pairs]
        return values, labels, weights, counted if counts else 0

    def _losses(
        self, inputs: Iterable[Nest], labels: Sequence[Nest], weights: Sequence[Fraction]
    ) -> list[Tensor]:
        shares = [
            [weighted(loss, weight) for loss in self._reference.losses_of(value, label)]
            for value, label, weight in zip(inputs, labels, weights)
        ]
        return [sum_in_order(by_function) for by_function in zip(*shares)]

    def _mean_over_replicas(self, losses: list[Tensor], counted: int) -> list[Tensor]:
        replicas = self._pipeline.replicas
        if replicas.ranks == 1:
            return losses
        if counted:
            share = share_in_mean(counted, replicas)
            losses = [weighted(loss, share) for loss in losses]
        return [sum_in_order(each) / replicas.ranks for each in zip(*replicas.all_gather(losses))]

    @contextmanager
    def _evaluating(
        self, inputs: Sequence[Nest], keys: random_keys.Keys | None
    ) -> Iterator[tuple[Iterator[Nest], Outputs]]:
        """While it is open, the reference evaluates with this replica's running statistics.

        It yields an iterator over the micro-batches' inputs, which sets the random stream of each,
        and the outputs of layers, which are recorded meanwhile.
        """
        reference = self._reference
        state = self._pipeline.layers.full_state_dict() if self._pipeline.replicas.ranks > 1 else {}
        state = parted(state, reference.tensors(), mp_shard)
        buffers = [name for name, tensor in reference.tensors().items() if tensor.stop_gradient]
        before = {name: reference.tensors()[name].clone() for name in buffers if state}
        _put({name: state[name] for name in before}, reference)
        reference.model.eval()
        recording = record_model(reference.model, reference.names)
        with paddle.no_grad(), as_the_next_batch(keys), recording as expected:
            yield self._in_turn(inputs, keys), expected
        _put(before, reference)

    def _in_turn(self, inputs: Sequence[Nest], keys: random_keys.Keys | None) -> Iterator[Nest]:
        """Yields the micro-batches' inputs, after it set the random stream of each."""
        first = self._pipeline.replicas.rank * self._pipeline.accumulate_steps
        for number, value in enumerate(inputs, first):
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(number)
            yield value


def _put(state: dict[str, Tensor], reference: Reference) -> None:
    tensors = reference.tensors()
    for name, value in state.items():
        tensors[name].set_value(value)
