"""Runs training batches, from their checks to the optimizer step, and batches forward only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

from fleetpipe.aliases import Nest, Optimizer, Scaler, Scheduler, Tensor
from fleetpipe.dygraph.batch.losses import Criterion, Losses, may_read
from fleetpipe.dygraph.batch.micro_batches import (
    MicroBatches,
    ObservedBatch,
    is_iterator,
    ragged_weights,
    require_count,
    send_gradients_to_sources,
    with_gradients,
    without_gradients,
)
from fleetpipe.dygraph.batch.row_digests import RowDigests, digests_of
from fleetpipe.dygraph.batch.stage_interfaces import Batch
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.gradients import divide_gradients
from fleetpipe.dygraph.random_keys import optimizer_stream
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

if TYPE_CHECKING:
    from fleetpipe.dygraph.train.runtime import Runtime


#: The class of schedulers that are stepped by the loss.
_SchedulerByLoss = paddle.optimizer.lr.ReduceOnPlateau


def require_steps(scheduler: Scheduler | None, by_micro_batch: bool = False) -> None:
    """Refuses a scheduler that :func:`step_rate` cannot step; called before the batch trains.

    Args:
        scheduler: A scheduler of Paddle's, or an object with its methods.
        by_micro_batch: Whether ``train_batch`` returns the losses of the micro-batches.

    Raises:
        ConfigError: ``step`` needs an argument.
    """
    if scheduler is None or (isinstance(scheduler, _SchedulerByLoss) and not by_micro_batch):
        return
    signature = inspect.signature(scheduler.step)
    try:
        signature.bind()
    except TypeError:
        raise ConfigError(
            "train_batch calls lr_scheduler.step() without arguments",
            got=f"{type(scheduler).__name__}.step{signature}"
            + ", and return_micro_batch_loss=True" * by_micro_batch,
            cause="it hands the loss to ReduceOnPlateau alone, and one loss only",
            fix="leave lr_scheduler out, and step it after train_batch by what that returns",
        ) from None


def step_rate(scheduler: Scheduler | None, loss: Nest, loss_fn_idx: int = 0) -> None:
    """Steps a scheduler after the optimizer's step.

    Args:
        scheduler: A scheduler that :func:`require_steps` has accepted.
        loss: The loss of the batch, for a ``ReduceOnPlateau``; the same on every rank. A list if
            there are several loss functions.
        loss_fn_idx: The number of the loss function that was trained.
    """
    if isinstance(scheduler, _SchedulerByLoss):
        trained: Tensor = loss[loss_fn_idx] if isinstance(loss, list) else loss
        scheduler.step(trained)
    elif scheduler is not None:
        scheduler.step()


class TrainingBatch:
    """One training batch: cuts its data, runs it, and has its loss.

    Attributes:
        loss: The loss of the batch after the run, the same on every rank; a list if there are
            several loss functions.
        observed: The description of the batch for observers.
    """

    loss: Nest

    def __init__(
        self,
        runtime: Runtime,
        data: Nest,
        loss_fn_idx: int = 0,
        scaler: Scaler = None,
        by_micro_batch: bool = False,
        weights: Sequence[Fraction] | None = None,
    ) -> None:
        """Cuts the batch, after all checks that need this rank alone.

        Args:
            runtime: The ``Runtime`` of the model.
            data: A batch in any form that ``train_batch`` takes.
            loss_fn_idx: The number of the loss function that starts backward.
            scaler: Scales the loss and steps the optimizer.
            by_micro_batch: Whether the loss is a Tensor [micro-batches].
            weights: The weight of each micro-batch in the loss; None for equal weights.

        Raises:
            ConfigError: The batch, the weights, loss_fn_idx or the grad mode does not fit.
            BoundaryError: A value is not made of Tensors.
            StateError: ``fleet.shutdown`` ended the job of the model, or gradients are left.
        """
        runtime.require_running()
        runtime.reductions.require_cleared()
        functions = required_loss_functions(runtime, loss_fn_idx)
        if not paddle.is_grad_enabled():
            raise ConfigError(
                "training needs gradients, and they are switched off",
                fix="leave paddle.no_grad(), or use eval_batch",
            )
        # Before the data is read, which may draw random numbers on some ranks.
        self._keys = runtime.keys.draw()
        data, self._sources = with_gradients(data)
        keeps_graph = bool(self._sources) or is_iterator(data)
        with runtime.job.progress.wall_time.spending("data"):
            batches = runtime.data.micro_batches(data, keeps_graph=keeps_graph)
        runtime.data.require(batches, labelled=True)
        detached = without_gradients(batches) if keeps_graph else batches
        self.observed = ObservedBatch(detached, self._keys, weights, loss_fn_idx, None, scaler)
        if weights is not None:
            runtime.weights.require(weights)
        weights, units = weights or runtime.weights.usual, runtime.units
        owns_last = runtime.data.owns_last
        labels = batches.labels if owns_last else None
        weight_of = runtime.weights.weight_of(functions, labels, weights)
        weight_of = units.weight_of(functions, batches, weight_of)
        batches = units.cut(batches)
        delayed = runtime.switches.delay_scale_loss
        by_tree = runtime.job.sums_by_tree
        self._losses = Losses(
            functions, weights, loss_fn_idx, delayed, weight_of, units.count, by_tree
        )
        self._shared = False
        scale = None if scaler is None else scaler.scale
        on_other_rank = () if owns_last else [*filter(may_read, functions)]
        self._batch = Batch(batches, self._losses, scale, on_other_rank)
        self._runtime = runtime
        self._by_micro_batch = by_micro_batch

    @property
    def digests(self) -> RowDigests:
        """Digests of the inputs and labels that this process was given."""
        return digests_of(self.observed.data)

    def train(self, optimizer: Optimizer = None) -> None:
        """Runs all micro-batches forward and backward, and then one step. Collective.

        Args:
            optimizer: The optimizer to step, after which gradients are cleared; None leaves the
                reduced gradients.

        Raises:
            BoundaryError: A value cannot cross between stages.
            PeerFailed: Another rank left.
            PipelineTimeout: A message did not come within the limit.
        """
        runtime = self._runtime
        # After this rank's own checks: a batch that one rank refuses is no collective call.
        runtime.job.call("trains a batch")
        self.observed = self.observed._replace(optimizer=optimizer)
        self._prepare()
        if runtime.job.copies().ranks == 1:
            # Only with one copy of the last stage: otherwise sharing would wait for other copies.
            self._losses.complete = self._share_losses
        try:
            with runtime.running(self._batch) as run:
                with runtime.keys.keyed(self._keys):
                    run({"REDUCE": self._reduce_gradients, "STEP": self._step})
                runtime.engines.observers.end()
            send_gradients_to_sources(self._sources, runtime.weights.divisor)
        finally:
            # Without this, the losses would keep this batch and its data alive.
            self._losses.complete = None

    def _prepare(self) -> None:
        """Prepares layers, observers and earlier gradients for the batch. Collective."""
        runtime = self._runtime
        runtime.layers.begin(training=True)
        if runtime.config.compare_rows:
            with runtime.job.guarded(lambda: "comparing the rows that ranks were given"):
                runtime.data.compare(self.observed.data, rate=self._rate)
        runtime.engines.observers.begin(self.observed)
        runtime.reductions.set_aside_gradients()

    @property
    def _rate(self) -> float | None:
        """The learning rate of the step that follows; None without a step."""
        # A script's own optimizer may have no get_lr; a process with the whole model takes it.
        rate = getattr(self.observed.optimizer, "get_lr", None)
        return None if rate is None else float(rate())

    def _share_losses(self) -> None:
        """Broadcasts the losses, once in a batch. Collective over the pipeline.

        The rank of the last stage sends them as soon as it has them, without a wait.
        """
        if not self._shared:
            runtime = self._runtime
            self.loss = runtime.reductions.share_losses(
                runtime.data.last_owner, self._by_micro_batch, rate=self._rate
            )
            self._shared = True

    def _reduce_gradients(self) -> None:
        """Called after the last backward: reduces losses and gradients. Collective."""
        self._share_losses()
        runtime = self._runtime
        if runtime.stage.watch is not None:
            runtime.stage.watch.leave()
        runtime.reductions.finish_trees()
        runtime.engines.observers.computed()
        runtime.reductions.reduce_gradients()
        runtime.engines.observers.reduced(self.loss)

    def _step(self) -> None:
        """Called after the reductions: steps the optimizer, if there is one."""
        if self.observed.optimizer is not None:
            take_step(self._runtime, self.observed.optimizer, self.observed.scaler)


def take_step(runtime: Runtime, optimizer: Optimizer, scaler: Scaler = None) -> None:
    """Steps the optimizer with the reduced gradients of a batch, and clears them. Collective.

    Args:
        runtime: The ``Runtime`` of the model.
        optimizer: The wrapped optimizer.
        scaler: The scaler of the loss; None for none.
    """
    if runtime.weights.divisor != 1:
        divide_gradients(runtime.layers.trained_parameters(), runtime.weights.divisor)
    update = functools.partial(_step_and_update_scale, optimizer, scaler)
    stage, shard = runtime.layers.owned_stages.owned[0], runtime.job.along("sharding").rank
    with optimizer_stream(getattr(optimizer, "wrapped", optimizer), stage, shard):
        runtime.engines.observers.step(update, optimizer, scaled=scaler is not None)
    runtime.reductions.share_loss_state(runtime.data.last_owner)
    if runtime.switches.release_gradients:
        optimizer.clear_grad(set_to_zero=False)
    else:
        optimizer.clear_grad()
    runtime.reductions.last_shards = None


def _step_and_update_scale(optimizer: Optimizer, scaler: Scaler) -> None:
    """Steps an optimizer; a scaler, if any, makes the step and then updates its scale."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def required_loss_functions(runtime: Runtime, index: int) -> list[Criterion]:
    """Returns all loss functions of the model; ``index`` must be the number of one of them.

    Raises:
        ConfigError: There is no loss function, or none with that number.
    """
    functions = runtime.layers.loss_functions()
    if index not in range(len(functions)):
        raise ConfigError(
            f"there is no loss function {index}",
            expected=f"loss_fn_idx from 0 to {len(functions) - 1}",
            fix="pass loss_fn=[f, g, ..] when you build the PipelineLayer",
        )
    return functions


@contextmanager
def run_forwards(
    runtime: Runtime,
    batches: MicroBatches,
    functions: Sequence[Criterion] | None = None,
    labels: Nest = None,
    result_of: Callable[[Nest], Nest] = lambda output: output,
    units: Units = WHOLE,
    compares_counts: bool = True,
    activity: str = "runs a batch forward",
) -> Iterator[Batch]:
    """Runs a batch forward, and yields its results. Collective.

    An error within the context reaches all ranks.

    Args:
        runtime: The ``Runtime`` of the model.
        batches: The micro-batches of this rank.
        functions: The loss functions to compute; None to collect the outputs.
        labels: The labels of the whole batch, by whose rows uneven micro-batches are weighted.
        result_of: ``result_of(output)`` returns the value to store for a micro-batch.
        units: Sets the states that layers keep from one run to the next, such as a cache.
        compares_counts: Whether to compare the numbers of micro-batches of the ranks, of which some
            may have none.
        activity: What this call does, for the error if other ranks make another call.

    Yields:
        The batch, with its losses or outputs if this process owns the last stage.

    Raises:
        ConfigError: A rank lacks data that it needs, or has another batch than the first stage.
        BoundaryError: A value cannot cross between stages.
        PeerFailed: Another rank left.
        PipelineTimeout: A message did not come within the limit.
        StateError: ``fleet.shutdown`` ended the job of the model.
    """
    runtime.require_running()
    runtime.job.require_others()
    runtime.data.require(batches, labelled=functions is not None)
    runtime.job.call(activity, replicas=functions is not None)
    keys = runtime.pass_over_forwards()
    if runtime.job.healing is not None:
        # Without keys, layers may draw numbers that a rank with a repeated result does not draw.
        why = "a batch runs forward whose outputs not all ranks have"
        runtime.job.healing.forbid_healing(why, allowed_in_share=keys is not None)
    count = len(batches.inputs or ())
    if compares_counts:
        with runtime.job.guarded(lambda: "evaluating"):
            # A rank without data cannot know how many micro-batches will come.
            count = runtime.data.compare(batches, count)
            require_count(batches, count)
    losses = None
    if functions is not None:
        equal_weight = Fraction(1, 1 if runtime.config.loss_reduction == "sum" else count)
        ragged = None
        if equal_weight.denominator > 1:
            ragged = ragged_weights(labels, runtime.data.cut())
        weights = ragged or [equal_weight] * count
        labels_here = batches.labels if runtime.data.owns_last else None
        weight_of = runtime.weights.weight_of(functions, labels_here, weights)
        losses = Losses(functions, weights, weight_of=weight_of, by_tree=runtime.job.sums_by_tree)
    value_of = runtime.layers.owned_stages.value_of
    batch = Batch(batches, losses, value_of=lambda output: result_of(value_of(output)))
    with (
        runtime.job.progress.wall_time.spending("evaluation"),
        runtime.running(batch, count, units) as run,
        paddle.no_grad(),
    ):
        with runtime.keys.keyed(keys):
            run({})
        yield batch
