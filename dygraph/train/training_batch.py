"""One batch that is trained: what is refused before any wait, the run, REDUCE and STEP."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.aliases import Nest, Optimizer, Scaler
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.batch.input_gradients import (
    hand_back,
    with_gradients,
    without_gradients,
)
from fleetpipe.dygraph.batch.losses import Criterion, Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, is_iterator, ragged_weights
from fleetpipe.dygraph.batch.observed import ObservedBatch
from fleetpipe.dygraph.batch.outputs import require_count
from fleetpipe.dygraph.batch.stage import Batch
from fleetpipe.dygraph.batch.units import WeightOf
from fleetpipe.dygraph.gradients import divide_gradients
from fleetpipe.dygraph.train.runtime import Runtime
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle


class TrainingBatch:
    """A batch between its data and its loss.

    Attributes:
        loss: The loss of the batch, the same on every rank, once it has run; a list where there
            are several loss functions.
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
        """Cuts the batch, and refuses what this rank can refuse by itself.

        Args:
            runtime: What it will run on.
            data: As for ``train_batch``.
            loss_fn_idx: Which of the model's loss functions backward starts from.
            scaler: Scales the loss and steps the optimizer.
            by_micro_batch: Whether the loss is a Tensor [micro-batches].
            weights: The weight of each micro-batch in the loss; None for the usual ones.

        Raises:
            ConfigError: The batch, the weights, loss_fn_idx or the grad mode does not fit.
            BoundaryError: A value is not made of Tensors.
            StateError: ``fleet.shutdown`` ended the job of the model, or gradients are left.
        """
        runtime.require_running()
        runtime.reductions.require_cleared()
        functions = runtime.loss_functions(loss_fn_idx)
        _require_gradients()
        # First, so that it does not matter which ranks' data draw random numbers too.
        self._keys = runtime.drawn_keys()
        data, self._sources = with_gradients(data)
        keeps_graph = bool(self._sources) or is_iterator(data)
        batches = runtime.micro_batches(data, keeps_graph=keeps_graph)
        runtime.require_data(batches, labelled=True)
        self._observed = ObservedBatch(
            without_gradients(batches), self._keys, weights, loss_fn_idx, None, scaler
        )
        delayed = runtime.switches.delay_scale_loss
        if weights is not None:
            by_tokens = runtime.config.loss_reduction == "tokens"
            _require_weights(weights, len(runtime.weights), delayed, by_tokens)
        weights, units = weights or runtime.weights, runtime.units
        weight_of = _weight_of(runtime, functions, batches, weights)
        weight_of = units.weight_of(functions, batches, weight_of)
        batches = units.cut(batches)
        self._losses = Losses(functions, weights, loss_fn_idx, delayed, weight_of, units.count)
        self._shared = False
        scale = None if scaler is None else scaler.scale
        elsewhere = () if runtime.plays(runtime.last_owner) else functions
        self._batch = Batch(batches, self._losses, scale, elsewhere)
        self._runtime = runtime
        self._by_micro_batch = by_micro_batch

    def train(self, optimizer: Optimizer = None) -> None:
        """Runs all micro-batches forward and backward, then one step. Collective.

        Args:
            optimizer: Steps, after which gradients are cleared; None leaves the gradients as the
                reductions have left them.

        Raises:
            BoundaryError: A value cannot cross between stages.
            PeerFailed: Another rank left.
            PipelineTimeout: A message did not come within the limit.
        """
        runtime = self._runtime
        self._observed = self._observed._replace(optimizer=optimizer)
        runtime.prepare(self._observed)
        if runtime.job.copies().ranks == 1:
            # Copies add their losses up, which none of them is to wait for between actions.
            self._losses.complete = self._share_losses
        try:
            with runtime.running(self._batch, runtime.engine, training=True):
                with random_keys.keyed(self._keys, runtime.job.model_parallel()):
                    collectives = {"REDUCE": self._reduce, "STEP": self._step}
                    first = runtime.first_micro_batch * runtime.units.count
                    runtime.engine.run(collectives, first)
                runtime.observers.end()
            delayed = runtime.switches.delay_scale_loss
            hand_back(self._sources, runtime.weights[0].denominator if delayed else 1)
        finally:
            # The losses hold on to this batch, and this to the data.
            self._losses.complete = None

    def _share_losses(self) -> None:
        """Gives the losses to all ranks. Collective over the pipeline; its last stage waits not.

        That stage gives them as soon as it has them: a rank that is done with its actions before
        the last one is need not wait for that.
        """
        if not self._shared:
            runtime = self._runtime
            self.loss = runtime.reductions.share_losses(
                runtime.losses, runtime.last_owner, self._by_micro_batch
            )
            self._shared = True

    def _reduce(self) -> None:
        self._share_losses()
        self._runtime.reduce(self.loss)

    def _step(self) -> None:
        if self._observed.optimizer is not None:
            take_step(self._runtime, self._observed.optimizer, self._observed.scaler)


def take_step(runtime: Runtime, optimizer: Optimizer, scaler: Scaler = None) -> None:
    """Steps with the gradients that a batch's reductions have left, and clears them."""
    if runtime.switches.delay_scale_loss:
        parameters = runtime.layers.trained_parameters()
        divide_gradients(parameters, runtime.weights[0].denominator)
    update = functools.partial(_update, optimizer, scaler)
    runtime.observers.step(update, optimizer, scaled=scaler is not None)
    if runtime.switches.release_gradients:
        optimizer.clear_grad(set_to_zero=False)
    else:
        optimizer.clear_grad()
    runtime.reductions.last_shards = None


def _update(optimizer: Optimizer, scaler: Scaler) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _weight_of(
    runtime: Runtime,
    functions: Sequence[Criterion],
    batches: MicroBatches,
    weights: Sequence[Fraction],
) -> WeightOf:
    """Returns what weighs micro-batches: by the places that all ranks' losses count, if asked.

    Args:
        runtime: What the batch runs on.
        functions: The loss functions.
        batches: The micro-batches, not cut into units.
        weights: The weight of each micro-batch in the loss.

    Raises:
        ConfigError: A loss function does not say what it counts.
    """
    by_tokens = runtime.config.loss_reduction == "tokens"
    by_places = by_tokens or runtime.sequence.ranks > 1
    if batches.labels is None or not by_places or not runtime.plays(runtime.last_owner):
        return lambda _, number: weights[number]
    group = runtime.job.copies() if by_tokens else runtime.sequence
    token_weights = pkgutil.resolve_name("fleetpipe.dygraph.batch.token_weights:TokenWeights")
    base = None if by_tokens else weights
    weight_of: WeightOf = token_weights(functions, batches.labels, base, group).of
    return weight_of


def _require_gradients() -> None:
    if not paddle.is_grad_enabled():
        raise ConfigError(
            "training needs gradients, and they are switched off",
            fix="leave paddle.no_grad(), or use eval_batch",
        )


def _require_weights(
    weights: Sequence[Fraction], micro_batches: int, delayed: bool, by_tokens: bool
) -> None:
    if by_tokens:
        raise ConfigError(
            "with loss_reduction='tokens' micro-batches count by their tokens",
            got="other weights",
            fix="leave the weights out, or set loss_reduction to 'mean'",
        )
    if delayed:
        raise ConfigError(
            "delay_scale_loss weights all micro-batches alike, after the last backward",
            got="other weights",
            fix="leave delay_scale_loss out, or the weights",
        )
    if len(weights) != micro_batches:
        raise ConfigError(
            "there is one weight for each micro-batch",
            expected=f"{micro_batches} weights (accumulate_steps)",
            got=f"{len(weights)} weights",
            fix="give each micro-batch its weight in the loss of the batch",
        )


@contextmanager
def forwarded(
    runtime: Runtime,
    batches: MicroBatches,
    functions: Sequence[Criterion] | None = None,
    labels: Nest = None,
) -> Iterator[Batch]:
    """Runs forwards; within it what they gave may be exchanged, still guarded. Collective.

    Args:
        runtime: What the batch runs on.
        batches: The micro-batches that this rank was given.
        functions: The loss functions to compute; None keeps the outputs.
        labels: The labels before they were cut, by whose rows uneven micro-batches count.

    Yields:
        The batch, with its losses or outputs where this process owns the last stage.

    Raises:
        ConfigError: A rank was not given what it needs, or another batch than the first stage.
        BoundaryError: A value cannot cross between stages.
        PeerFailed: Another rank left.
        PipelineTimeout: A message did not come within the limit.
        StateError: ``fleet.shutdown`` ended the job of the model.
    """
    runtime.require_running()
    runtime.require_data(batches, labelled=functions is not None)
    keys = runtime.drawn_keys()
    runtime.layers.begin(training=False)
    with runtime.job.guarded(lambda: "evaluating"):
        # A rank without data cannot know how many micro-batches will come.
        count = runtime.compare_rows(batches, len(batches.inputs or ()))
        require_count(batches, count)
    losses = None
    if functions is not None:
        share = Fraction(1, 1 if runtime.config.loss_reduction == "sum" else count)
        ragged = ragged_weights(labels, runtime.cut()) if share.denominator > 1 else None
        weights = ragged or [share] * count
        weight_of = _weight_of(runtime, functions, batches, weights)
        losses = Losses(functions, weights, weight_of=weight_of)
    batch = Batch(batches, losses, value_of=runtime.layers.value_of)
    engine = runtime.evaluation.engine(count)
    with runtime.running(batch, engine, training=False), paddle.no_grad():
        with random_keys.keyed(keys, runtime.job.model_parallel()):
            engine.run({}, runtime.first_micro_batch)
        yield batch
