"""Runs a pipeline and its reference, the model on one device, and compares them step by step.

Start with ``Session.step``. ``Evaluations`` compares ``eval_batch`` and ``predict_batch``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from fractions import Fraction
from typing import Any, NamedTuple

from fleetpipe import dygraph, numerics
from fleetpipe.aliases import Nest, Scaler, Scheduler, Tensor
from fleetpipe.compare.differences import ROUNDING, Difference, compare_numbers, compare_values
from fleetpipe.dygraph import PipelineParallel, random_keys, weighted
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, counted_in, join_outputs
from fleetpipe.dygraph.optimizer.replicas import share_in_mean
from fleetpipe.job.job import all_ranks, current_job, mp_shard, pipeline_group
from fleetpipe.job.records import line_of_the_script
from fleetpipe.mesh.parts import split_into_parts
from fleetpipe.paddle_api import paddle
from fleetpipe.parity import recorded_values
from fleetpipe.parity.beside import (
    ReferenceTrainer,
    RepeatedBatch,
    cut_value,
    random_numbers_of_batch,
    shares_of_rows,
)
from fleetpipe.parity.parity_report import Orders, Repetition, Report, in_order, usual_tolerance
from fleetpipe.parity.recorded_values import (
    Outputs,
    compare_outputs,
    part_of,
    record_model,
    record_stages,
    sequence_parts,
)
from fleetpipe.parity.reference import (
    ComparingOptimizer,
    Rates,
    Reference,
    Squares,
    compare_state,
    sum_in_order,
)
from fleetpipe.representation import shows
from fleetpipe.schedules.action import GlobalMicroBatch


class Evaluations:
    """Runs evaluations of a pipeline, and compares each with the reference's."""

    def __init__(self, pipeline: PipelineParallel, reference: Reference) -> None:
        """Takes the two sides: a pipeline, and the model on one device."""
        self._pipeline = pipeline
        self._reference = reference

    def eval_batch(
        self, call: Callable[..., Any], step: int, data: Any, compute_loss: bool, *more: Any
    ) -> tuple[Nest, list[Difference]]:
        """Runs ``eval_batch`` of a pipeline, and compares it with its reference. Collective.

        Args:
            call: The pipeline's method ``eval_batch``.
            step: The number of training steps before the call.
            data: The batch, as the method takes it.
            compute_loss: Whether the method returns the loss, not the outputs.
            more: The further arguments of the method.

        Returns:
            The result of the pipeline's call, and the differences on this rank.
        """
        batch = RepeatedBatch(data, self._pipeline.accumulate_steps)
        run = functools.partial(call, batch.repeat(), compute_loss, *more)
        result, expected, differences = self._evaluate_both(
            "eval_batch", step, run, batch, compute_loss
        )
        if compute_loss:
            losses = expected if len(expected) > 1 else expected[0]
            differences += compare_values("loss", "eval_batch", step, result, losses, part_of)
        else:
            # Only the owner of the last stage returns outputs.
            name, outputs = "eval_batch, micro-batch ", expected if self._owns_last_stage else []
            differences += compare_values("output", name, step, result, outputs, part_of)
        return result, differences

    def predict_batch(
        self, call: Callable[..., Any], step: int, inputs: Nest, broadcast: bool
    ) -> tuple[Nest, list[Difference]]:
        """Runs ``predict_batch`` of a pipeline, and compares it with its reference. Collective.

        Args:
            call: The pipeline's method ``predict_batch``.
            step: The number of training steps before the call.
            inputs: The inputs of the batch.
            broadcast: Whether every rank gets the outputs, not only the owner of the last stage.

        Returns:
            The result of the pipeline's call, and the differences on this rank.
        """
        batch = RepeatedBatch((inputs, None), self._pipeline.accumulate_steps)
        run = functools.partial(call, inputs, broadcast)
        result, outputs, differences = self._evaluate_both(
            "predict_batch", step, run, batch, losses=False
        )
        expected = join_outputs(outputs) if broadcast or self._owns_last_stage else None
        differences += compare_values("output", "predict_batch", step, result, expected, part_of)
        return result, differences

    def _evaluate_both(
        self, name: str, step: int, run: Callable[[], Nest], batch: RepeatedBatch, losses: bool
    ) -> tuple[Nest, list[Nest], list[Difference]]:
        """Runs an evaluation on both sides, and compares the outputs of layers. Collective.

        Args:
            name: The name of the pipeline's method.
            step: The number of training steps before it.
            run: Calls the method.
            batch: The batch of the call.
            losses: Whether the reference computes losses, not outputs.

        Returns:
            The result of the pipeline; the reference's losses, or its outputs by micro-batch; the
            differences in layers on this rank.
        """
        keys = self._pipeline.next_keys(training=False)
        with record_stages(self._pipeline.layers) as outputs:
            result = run()
        inputs, labels, weights, replica_weight = self._share_batches(*batch.parts())
        with self._evaluating(inputs, keys) as (values, expected_outputs):
            if losses:
                expected = self._compute_losses(values, labels, weights)
            else:
                expected = [self._reference.model(value) for value in values]
        if losses:
            expected = self._mean_over_replicas(expected, replica_weight)
        suffix = f" of {name}"
        return result, expected, compare_outputs(outputs, expected_outputs, step, call_of=suffix)

    @property
    def _owns_last_stage(self) -> bool:
        """Whether this process owns the last stage, and so has outputs."""
        return self._pipeline.is_pipeline_last_stage(ignore_virtual=True)

    def _owner_of(self, stage: int) -> int:
        """Returns the rank in the pipeline that owns a stage; -1 is the last stage."""
        placement = self._pipeline.schedule.placement
        return placement.rank_of(stage % placement.stages)

    def _share_batches(
        self, inputs: Nest, labels: Nest
    ) -> tuple[list[Nest], list[Nest], list[Fraction], int]:
        """Sends the micro-batches and their weights in the loss to every rank. Collective.

        Args:
            inputs: The inputs of the batch, on the owner of stage 0.
            labels: The labels, on the owner of the last stage; None for a prediction.

        Returns:
            By micro-batch the inputs, the labels and the weights; and the weight of this replica in
            the mean over replicas, 0 if all have the same.
        """
        pipeline, group, ranks = self._pipeline, pipeline_group(), sequence_parts()
        size, count = pipeline.micro_batch_size, pipeline.accumulate_steps
        input_parts, label_parts = cut_value(inputs, size, count), cut_value(labels, size, count)
        input_parts = group.broadcast(input_parts, self._owner_of(0))
        if ranks is not None:
            input_parts = ranks.whole_batch(input_parts)
        micro_batches = len(input_parts)
        is_mean = sum(pipeline.weights) == 1  # of a summed loss each weight is 1
        weights = [Fraction(1, micro_batches if is_mean else 1)] * micro_batches
        if is_mean:
            weights = shares_of_rows(labels, size) or weights
        # A message carries integers, and no fractions.
        pairs = [[weight.numerator, weight.denominator] for weight in weights]
        replica_weight = counted_in(labels) or micro_batches
        label_parts, pairs, replica_weight = group.broadcast(
            (label_parts, pairs, replica_weight), self._owner_of(-1)
        )
        if ranks is not None:
            label_parts = ranks.whole_batch(label_parts)
        token_weights = (
            pipeline.token_weights(label_parts, pipeline.replicas) if label_parts else None
        )
        if token_weights or not is_mean:
            replica_weight = 0  # weights by tokens are shares of all replicas
        weights = token_weights or [Fraction(*pair) for pair in pairs]
        return input_parts, label_parts, weights, replica_weight

    def _compute_losses(
        self, inputs: Iterable[Nest], labels: Sequence[Nest], weights: Sequence[Fraction]
    ) -> list[Tensor]:
        """Returns the reference's loss of the batch for each loss function.

        Args:
            inputs: The inputs of each micro-batch.
            labels: The labels of each micro-batch.
            weights: The weight of each micro-batch in the loss.
        """
        shares = [
            [weighted(loss, weight) for loss in self._reference.losses_of(value, label)]
            for value, label, weight in zip(inputs, labels, weights)
        ]
        return [sum_in_order(by_function) for by_function in zip(*shares)]

    def _mean_over_replicas(self, losses: list[Tensor], replica_weight: int) -> list[Tensor]:
        """Returns each loss's mean over the replicas.

        ``replica_weight`` is this one's weight, such as its number of rows; 0 if all weigh alike.
        """
        replicas = self._pipeline.replicas
        if replicas.ranks == 1:
            return losses
        if replica_weight:
            share = share_in_mean(replica_weight, replicas)
            losses = [weighted(loss, share) for loss in losses]
        return [sum_in_order(each) / replicas.ranks for each in zip(*replicas.all_gather(losses))]

    @contextmanager
    def _evaluating(
        self, inputs: Sequence[Nest], keys: random_keys.Keys | None
    ) -> Iterator[tuple[Iterator[Nest], Outputs]]:
        """In this context, the reference evaluates with this replica's running statistics.

        Yields:
            An iterator over the micro-batches' inputs, which sets the random stream of each; and
            the outputs of the reference's layers.
        """
        reference = self._reference
        # With one replica the reference has the same statistics already.
        state = self._pipeline.layers.full_state_dict() if self._pipeline.replicas.ranks > 1 else {}
        state = split_into_parts(state, reference.tensors(), mp_shard)
        buffers = [name for name, tensor in reference.tensors().items() if tensor.stop_gradient]
        before = {name: reference.tensors()[name].clone() for name in buffers if state}
        _set_state({name: state[name] for name in before}, reference)
        reference.model.eval()
        recording = record_model(reference.model, reference.names)
        with paddle.no_grad(), random_numbers_of_batch(keys), recording as expected:
            yield self._set_streams(inputs, keys), expected
        _set_state(before, reference)

    def _set_streams(self, inputs: Sequence[Nest], keys: random_keys.Keys | None) -> Iterator[Nest]:
        """Sets the random stream of each micro-batch, and yields the micro-batch's inputs."""
        first = self._pipeline.replicas.rank * self._pipeline.accumulate_steps
        for number, value in enumerate(inputs, first):
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(number)
            yield value


def _set_state(state: dict[str, Tensor], reference: Reference) -> None:
    """Sets the values of a reference's parameters and buffers, by name."""
    tensors = reference.tensors()
    for name, value in state.items():
        tensors[name].set_value(value)


class Calls(NamedTuple):
    """The original methods of a pipeline, which ``fleetpipe parity`` replaces by comparing ones."""

    train_batch: Callable[..., Any]
    eval_batch: Callable[..., Any]
    predict_batch: Callable[..., Any]


@shows(steps="report.steps", tolerance="report.tolerance")
class Session:
    """Compares a pipeline with its reference on the same batches.

    Its constructor and every method are collective over the job. Each rank runs the whole reference
    and compares the stages that it owns; every rank gets the differences of all ranks.
    """

    def __init__(
        self,
        pipeline: dygraph.PipelineParallel,
        reference: Reference,
        calls: Calls | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Prepares a comparison; call :meth:`train_with` before the first step.

        Args:
            pipeline: The wrapped model.
            reference: The single-device side, with the same weights.
            calls: The functions that run the pipeline; None takes the pipeline's methods.
            tolerance: The largest relative difference that passes, as for
                :func:`fleetpipe.parity.begin`.
        """
        self._pipeline = pipeline
        self._reference = reference
        #: Whether a batch of the pipeline runs.
        self._runs = False
        self._trainer = ReferenceTrainer(pipeline, reference)
        # The shadow of a captured model would be a second reference.
        pipeline.accompany(None)
        methods = (pipeline.train_batch, pipeline.eval_batch, pipeline.predict_batch)
        self._calls = calls or Calls(*methods)
        self._replicas = pipeline.replicas
        self._tolerance_given = tolerance is not None
        if tolerance is None:
            tolerance = usual_tolerance(pipeline, reference)
        self._names = _names_in_order(pipeline.layers)
        #: The parameters and buffers that differ since an earlier step.
        self._differing: set[str] = set()
        self._edge_watch = recorded_values.EdgeWatch()
        pipeline.observe(self._edge_watch)
        numerics.repeat_bits()
        self.report = Report(numerics.settings(), tolerance=tolerance)
        if (job := current_job()) is not None:
            self.report.allowed = job.allow.used
        self._orders = Orders(pipeline, self.report)
        self._repetition = Repetition(reference, self.report)
        self._evaluations = Evaluations(pipeline, reference)

    def train_with(self, optimizer: dygraph.PipelineOptimizer) -> None:
        """Sets the optimizer of the next steps. Collective when an optimizer is new."""
        self._reference.train_like(optimizer, self._pipeline.layers)
        self._optimizer = optimizer

    def step(
        self,
        data: Any,
        lr_scheduler: Scheduler | None = None,
        scaler: Scaler | None = None,
        return_micro_batch_loss: bool = False,
        weights: Sequence[Fraction] | None = None,
    ) -> tuple[Nest, Nest]:
        """Trains both sides for one batch, and compares them. Collective.

        Args:
            data: As for ``train_batch``.
            lr_scheduler: The pipeline's scheduler; the reference has a copy.
            scaler: As for ``train_batch``.
            return_micro_batch_loss: As for ``train_batch``.
            weights: As for ``train_batch``.

        Returns:
            The losses of the reference and of the pipeline; lists if there are several loss
            functions.
        """
        step, layers = self.report.steps, self._pipeline.layers
        batch = RepeatedBatch(data, self._pipeline.accumulate_steps)
        batches, differences = self._cut_batch(batch)
        batches_here, everyone = self._pipeline.share(batches)
        reference = self._reference
        reference.copy_switches(layers)
        differences += self._find_changes_between_steps()
        rates = Rates(self._optimizer, reference.optimizer, lr_scheduler, reference.takes_rate)
        keys = self._pipeline.next_keys()
        # The context in which the reference draws the random numbers of the pipeline's batch.
        drawing = functools.partial(random_numbers_of_batch, keys)
        train = functools.partial(self._trainer.train, everyone, weights, return_micro_batch_loss)
        expected, single = self._repetition.train(train, drawing)
        self._edge_watch.first_micro_batch = self._first_micro_batch * self._pipeline.units.count
        with record_stages(layers) as outputs, self._orders.recording_crossings() as crossings:
            before_update = functools.partial(
                self._compare_before_update, rates, batches_here, weights, keys
            )
            optimizer = ComparingOptimizer(
                self._optimizer, reference, layers, step, self._is_rounding, before_update
            )
            # A user's own train_batch takes only the first four arguments.
            options = {"return_micro_batch_loss": return_micro_batch_loss, "weights": weights}
            more: dict[str, Any] = {name: value for name, value in options.items() if value}
            self._runs = True
            try:
                loss = self._calls.train_batch(
                    batch.repeat(), optimizer, lr_scheduler, scaler, **more
                )
            finally:
                self._runs = False
                reference.remember_attributes(layers)
        differences += batch.differences(step) + optimizer.differences
        differences += compare_outputs(outputs, expected, step, self._replicas.rank)
        state = compare_state(layers, reference, step, self._is_alone)
        self._differing = {one.name for one in self.report.beyond(state)}
        differences += state
        differences += compare_values("loss", "", step, loss, single) + rates.step(step, single)
        self._merge_differences(differences, optimizer.squares)
        if not self._tolerance_given:
            self._orders.report_orders(crossings)
        self.report.single_loss.append(float(_first_loss(single).sum()))
        self.report.pipeline_loss.append(float(_first_loss(loss).sum()))
        return single, loss

    def follow_step(self, optimizer: dygraph.PipelineOptimizer) -> None:
        """Steps the reference after a step that the script itself has made. Collective.

        Does nothing for steps of other optimizers than that of :meth:`train_with`, and within a
        batch.
        """
        if getattr(self, "_optimizer", None) is optimizer and not self._runs:
            Rates(optimizer, self._reference.optimizer, None, self._reference.takes_rate)
            self._reference.step()

    def eval_batch(
        self,
        data: Any,
        compute_loss: bool = False,
        loss_fn_idx: int = 0,
        return_host_tensor: bool = False,
    ) -> Nest:
        """Calls the pipeline's ``eval_batch``, compares, and returns its result. Collective."""
        compared, call = self._evaluations.eval_batch, self._calls.eval_batch
        return self._evaluate(compared, call, data, compute_loss, loss_fn_idx, return_host_tensor)

    def predict_batch(self, inputs: Nest, broadcast: bool = True) -> Nest:
        """Calls the pipeline's ``predict_batch``, compares, and returns its result. Collective."""
        compared, call = self._evaluations.predict_batch, self._calls.predict_batch
        return self._evaluate(compared, call, inputs, broadcast)

    def _evaluate(self, compared: Callable[..., Any], call: Callable[..., Any], *more: Any) -> Nest:
        """Calls a method of the pipeline, and compares its result.

        Args:
            compared: The method of :class:`Evaluations` that calls and compares.
            call: The pipeline's method.
            more: The arguments of ``call``.
        """
        layers, reference = self._pipeline.layers, self._reference
        reference.copy_switches(layers)
        changed = self._find_changes_between_steps()
        result, differences = compared(call, self.report.steps, *more)
        reference.remember_attributes(layers)
        self._merge_differences(changed + differences, {})
        self.report.evaluations += 1
        return result

    def _cut_batch(self, batch: RepeatedBatch) -> tuple[MicroBatches, list[Difference]]:
        """Cuts a batch into micro-batches, and compares them with the pipeline's micro-batches.

        Returns:
            The micro-batches of this replica for the reference, and the differences.
        """
        # The pipeline first, since it raises the error if the batch does not fit.
        pipeline_batches = self._pipeline.micro_batches(batch.repeat())
        reference_batches = batch.micro_batches(self._pipeline.micro_batch_size)
        differences = []
        for name, ours, expected in zip(
            reference_batches._fields, pipeline_batches, reference_batches
        ):
            differences += compare_values("micro-batch", name, self.report.steps, ours, expected)
        return reference_batches, differences

    @property
    def _is_alone(self) -> bool:
        """Whether this replica sees all data, so that its statistics must equal the reference's."""
        return self._replicas.ranks == self._pipeline.sequence.ranks == 1

    def _find_changes_between_steps(self) -> list[Difference]:
        """Returns differences of the state that have appeared since the last step. Collective.

        For example, the script may set values, or step an optimizer that parity does not know.
        """
        step, layers = self.report.steps, self._pipeline.layers
        state = compare_state(layers, self._reference, step, self._is_alone)
        changed = [one for one in self.report.beyond(state) if one.name not in self._differing]
        self._differing.update(one.name for one in changed)
        where = f"changed outside of a step, before {line_of_the_script()},"
        return [
            replace(one, quantity=f"initial {one.quantity}", name=f"{one.name}, {where}")
            for one in changed
        ]

    @property
    def _first_micro_batch(self) -> int:
        """The global number of this replica's micro-batch 0."""
        return self._replicas.rank * self._pipeline.accumulate_steps

    def _compare_before_update(
        self,
        rates: Rates,
        batches: MicroBatches,
        weights: Sequence[Fraction] | None,
        keys: dygraph.random_keys.Keys | None,
        gradients: list[Difference],
    ) -> list[Difference]:
        """Compares learning rates and, if gradients differ, the gradients that stages sent back.

        Args:
            rates: The learning rates of both sides.
            batches: The micro-batches of this replica.
            weights: The weights of these micro-batches in the loss; None takes the pipeline's.
            keys: The keys of the batch's random numbers; None if these have no keys.
            gradients: The differences of the parameters' gradients on this rank.

        Returns:
            The differences of learning rates and edges on this rank.
        """
        step, model = self.report.steps, self._reference.model
        differences = rates.compare(step)
        wrong = bool(self.report.beyond(gradients))
        # Without keys layers draw other numbers in a second run; edges must carry full sequences.
        full = self._pipeline.sequence.ranks == 1
        if not (wrong and full and keys is not None and isinstance(model, dygraph.SingleModel)):
            return differences
        first, units = self._first_micro_batch, self._pipeline.units
        weights = weights or self._pipeline.weights_in_backward
        copies = recorded_values.copies_at_borders(model, self._pipeline.layers)
        with random_numbers_of_batch(keys), paddle.enable_grad(), copies as expected:
            self._trainer.accumulate(batches, weights, first)
        ours = self._edge_watch.gradients
        return differences + recorded_values.compare_edges(ours, expected, first, step, units)

    def _is_rounding(self, gradient: Difference) -> bool:
        """Returns whether rounding explains a gradient's difference."""
        return gradient.relative <= max(self.report.limit(gradient), ROUNDING)

    def _merge_differences(self, differences: list[Difference], squares: Squares) -> None:
        """Adds all ranks' differences to the report; compares the gradients' norm. Collective.

        Args:
            differences: The differences of a step, or of an evaluation, on this rank.
            squares: By parameter the squared norms of this rank's gradient and of the reference's;
                empty for an evaluation.
        """
        parts = all_ranks().all_gather((list(map(astuple, differences)), squares))
        everything = [Difference(*fields) for rows, _ in parts for fields in rows]
        # By name, since replicas, shards and holders of a tied weight have equal full gradients.
        full = {name: pair for _, pairs in parts for name, pair in pairs.items()}
        norms = [math.sqrt(math.fsum(pair[side] for pair in full.values())) for side in (0, 1)]
        everything += compare_numbers("gradient norm", "", self.report.steps, *norms)
        self.report.differences += in_order(list(dict.fromkeys(everything)), self._names)


def _first_loss(loss: Nest) -> Tensor:
    """Returns the loss of the first loss function."""
    return loss[0] if isinstance(loss, list) else loss


def _names_in_order(layers: dygraph.PipelineLayer) -> list[str]:
    """Returns the names of layers, parameters and edges, in the order of the model."""
    names: list[str] = []
    last_stage = 0  # of the layers so far; the edge from a stage follows its layers
    for slot in layers.state.slots():
        stage = layers.state.stage_of(slot.name)
        if stage is not None:
            names += map(recorded_values.edge_name, range(last_stage, stage))
            last_stage = max(last_stage, stage)
        names += [slot.name.rpartition(".")[0], slot.name]
    return [*names, *map(recorded_values.edge_name, range(last_stage, layers.placement.stages - 1))]
