"""Runs batches of any number of rows on a pipeline; every rank gets losses and metrics.

Start with ``Runner``. ``Precision`` is the mixed precision of ``amp_configs``. A *share* is a
micro-batch's weighted loss: the shares of a batch add up to the batch's loss.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from fleetpipe import fleet, log
from fleetpipe.aliases import Layer, Nest, Optimizer, Scaler, Tensor
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.batch.losses import weighted
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import ConfigError
from fleetpipe.fit.micro_batches import (
    Criterion,
    Metric,
    MetricCounter,
    RowCut,
    Rows,
    cut_into_micro_batches,
    first_rows,
    join_cuts,
    single_or_tuple,
)
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import checked_amp, rehearsal_dtype
from fleetpipe.paddle_api.device import device_kind

_log = log.logger(__name__)

#: Of type Any, since Paddle's stubs accept only literals.
_amp: Any = paddle.amp


class Precision(NamedTuple):
    """The precision in which a model computes.

    Attributes:
        level: ``"O0"`` for full precision, ``"O1"`` or ``"O2"``.
        lists: Further arguments of ``auto_cast``, such as lists of operations.
        scaler: The ``GradScaler`` of the losses; None in full precision.
    """

    level: str = "O0"
    lists: Mapping[str, Any] = MappingProxyType({})
    scaler: Scaler = None

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context in which operations compute in this precision."""
        if self.level == "O0":
            return nullcontext()
        cast: AbstractContextManager[None] = _amp.auto_cast(level=self.level, **self.lists)
        return cast


def precision_from_configs(
    configs: str | dict[str, Any] | None, network: Layer, optimizer: Optimizer
) -> Precision:
    """Returns the precision that ``amp_configs`` asks for; with ``"O2"``, casts the parameters.

    Args:
        configs: A level, or a dict with ``level`` and the options of ``auto_cast`` and
            ``GradScaler``; None for full precision.
        network: The model.
        optimizer: The user's optimizer.

    Raises:
        ConfigError: The configs are of no form that Paddle knows.
    """
    try:
        level, lists, scaling = checked_amp(configs, optimizer)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"amp_configs: {error}",
            got=repr(configs),
            fix="prepare(.., amp_configs='O1'), or a dict with 'level' and options of "
            "paddle.amp.auto_cast and paddle.amp.GradScaler",
        ) from error
    if level == "O0":
        return Precision()
    if device_kind() == "cpu" and rehearsal_dtype() is None:
        log.once(
            _log.warning,
            "amp_configs: on a CPU auto_cast changes nothing; all is computed as it is",
        )
        return Precision()
    if level == "O2":
        _amp.decorate(models=network, optimizers=optimizer, level=level)
    return Precision(level, lists, fleet.distributed_scaler(_amp.GradScaler(**scaling)))


class Runner:
    """Runs batches on a wrapped model, with the loss and the metrics of ``Model.prepare``.

    The methods that take rows are collective over the job.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        job: Job,
        loss: Callable[..., Nest] | None,
        metrics: Sequence[Metric],
        optimizer: PipelineOptimizer | None,
        precision: Precision,
    ) -> None:
        """Makes the loss and the metrics part of the pipeline's last stage.

        Args:
            pipeline: The wrapped model.
            job: The job of the model.
            loss: ``loss(*outputs, *labels)``; None if there is no training.
            metrics: The metrics, which count the outputs of every batch with labels.
            optimizer: The wrapped optimizer; None if there is no training.
            precision: The precision in which the model computes.
        """
        self.pipeline = pipeline
        self._job = job
        #: Gets the loss and the metrics of each batch, for the board of the job.
        self.progress = job.progress
        self.optimizer = optimizer
        self.metrics = metrics
        self.has_loss = loss is not None
        self.precision = precision
        self._default_rows = (pipeline.micro_batch_size,) * pipeline.accumulate_steps
        self._counting = MetricCounter(metrics, lambda: pipeline.micro_batch_id)
        in_parts = pipeline.layers.placement.has_head
        if in_parts:
            _require_loss_by_shards(pipeline, loss, metrics)
        pipeline.layers.take_loss(Criterion(loss, self._counting, in_parts))
        self._steps = pipeline.accumulate_steps
        # The factor that is applied to gradients after backward; 1 without delay_scale_loss.
        self._late_factor = pipeline.weights[0] / pipeline.weights_in_backward[0]
        #: The share of each micro-batch in the loss of the last training batch.
        self.shares: list[float] = []
        #: Number of batches trained so far.
        self.trained = 0

    def train(self, batches: Sequence[Rows], step: bool = True) -> Iterator[float]:
        """Trains on batches with one step, then yields the loss of each batch.

        The metrics count a batch just before its loss is yielded. A batch's loss is a mean over its
        rows, and the gradients of all batches are added up, as with Paddle's
        ``accumulate_grad_batches``. Without ``step`` the gradients stay on the parameters.
        """
        is_single = len(batches) == 1
        cuts = [self._cut_batch(rows, is_single) for rows in batches]
        cut = cuts[0] if is_single else join_cuts(cuts)
        with self._micro_batches(len(cut.rows)), self.precision.computing():
            self._counting.begin(cut.rows)
            train: Callable[..., Nest] = self.pipeline.forward_backward_pipeline
            if step:
                train = functools.partial(
                    self.pipeline.train_batch, optimizer=cast(PipelineOptimizer, self.optimizer)
                )
            shares = train(
                cut.data,
                scaler=self.precision.scaler,
                weights=self._micro_batch_weights(cuts),
                return_micro_batch_loss=True,
            )
        computed = self._gather_results()
        shares = _on_host(shares)
        self.shares = weighted(shares, self._late_factor).tolist()
        begin = 0
        for batch in cuts:
            micro_batches = slice(begin, begin + len(batch.rows))
            self._counting.update([replica[micro_batches] for replica in computed])
            total = _sum_in_order(shares[micro_batches])
            yield _only_number(weighted(total, self._late_factor))
            begin = micro_batches.stop

    def _cut_batch(self, rows: Rows, is_single: bool) -> RowCut:
        """Returns a batch in micro-batches; a single batch of the usual size is left uncut.

        Args:
            rows: The batch.
            is_single: Whether the step has no other batch.
        """
        if not is_single or rows.rows != self._steps * self.pipeline.micro_batch_size:
            return cut_into_micro_batches(rows, self._steps)
        labels = single_or_tuple(rows.labels) if rows.labels else [None] * self._steps
        return RowCut([single_or_tuple(rows.inputs), labels], self._default_rows)

    def _micro_batch_weights(self, cuts: Sequence[RowCut]) -> list[Fraction] | None:
        """Returns the weight of each micro-batch in the loss; None for the pipeline's own weights.

        Args:
            cuts: The batches of a step.
        """
        default = len(cuts[0].rows) == self._steps and len(set(cuts[0].rows)) == 1
        if len(cuts) == 1 and (default or self.pipeline.counts_tokens):
            return None
        if self._late_factor != 1:
            raise ConfigError(
                "delay_scale_loss weights all micro-batches of a step alike",
                got=f"micro-batches of {' + '.join(str(list(cut.rows)) for cut in cuts)} rows",
                fix="fit(.., drop_last=True, accumulate_grad_batches=1) with a batch_size that "
                "accumulate_steps divides; or leave delay_scale_loss out",
            )
        # For a sum over micro-batches the weights of a mean are multiplied by their number.
        is_summed = self.pipeline.weights[0] == 1
        return [w * (len(cut.rows) if is_summed else 1) for cut in cuts for w in cut.weights]

    def evaluate(self, rows: Rows) -> tuple[float, float]:
        """Evaluates a batch, and updates the metrics.

        Returns:
            The mean loss over the rows that count in all replicas, and the number of these rows;
            with ``loss_reduction="tokens"`` the mean over tokens, and the number of tokens.
        """
        loss, weight, computed = self._job.share(
            "an evaluation", lambda: self._evaluate_batch(rows), self.pipeline.pass_over_forwards
        )
        self._counting.update(computed)
        return float(loss), float(weight)

    def _evaluate_batch(self, rows: Rows) -> tuple[float, float, list[Nest]]:
        """Returns the results of :meth:`evaluate`, and the results of the metrics' ``compute``."""
        # A replica with padding alone evaluates one row of it, to take part in the collectives.
        count = max(rows.real, 1)
        with self._forward_only(count) as size:
            starts = range(0, count, size)
            self._counting.begin([max(0, min(size, rows.real - start)) for start in starts])
            inputs, labels = first_rows(rows.inputs, count), first_rows(rows.labels, count)
            if labels is None:
                labels = [None] * len(starts)
            loss = self.pipeline.eval_batch([inputs, labels], compute_loss=True)
        computed = self._gather_results()
        by_tokens, replicas = self.pipeline.counts_tokens, self.pipeline.replicas.ranks
        if not by_tokens and rows.everywhere == rows.rows * replicas:
            return _only_number(loss), rows.everywhere, computed
        losses, share = self.pipeline.total_loss, None
        if losses is not None:
            tokens = self.pipeline.counted(first_rows(rows.labels, count)) if by_tokens else 0.0
            share = [_only_number(_sum_in_order(_on_host(losses[0]))), tokens, rows.real]
        # The loss, the tokens and the rows that count, of each replica.
        shares = self.pipeline.from_last_stage(share)
        if not by_tokens:
            mean = sum(loss * real for loss, _, real in shares) / rows.everywhere
            return mean, rows.everywhere, computed
        # Each replica's loss is weighted by its share of all tokens; rows that do not count add 0.
        all_tokens = sum(tokens for _, tokens, _ in shares)
        real_tokens = sum(tokens for _, tokens, real in shares if real)
        total = sum(loss for loss, _, real in shares if real) * all_tokens / replicas
        return (total / real_tokens if real_tokens else 0.0), real_tokens, computed

    def predict(self, rows: Rows) -> list[np.ndarray]:
        """Returns the outputs for the rows that count in all replicas, in the dataset's order.

        Raises:
            ConfigError: There are several micro-batches, and an output is not [rows, ..].
        """
        count = max(rows.real, 1)
        with self._forward_only(count) as size:
            output = self.pipeline.predict_batch(first_rows(rows.inputs, count), broadcast=False)
        outputs = list(tensors_of(output)) if output is not None and rows.real else []
        if count > size or self.pipeline.replicas.ranks > 1:
            _require_rows(outputs, count)
        by_replica = [outputs for outputs in self.pipeline.from_last_stage(outputs) if outputs]
        return [np.concatenate([part.numpy() for part in parts]) for parts in zip(*by_replica)]

    def measured_bytes(self, rows: Rows) -> list[float]:
        """Returns the bytes that a forward of one micro-batch leaves allocated in each stage."""
        cut = cut_into_micro_batches(rows, self._steps)
        self._counting.begin([0] * len(cut.rows))
        with self._micro_batches(len(cut.rows)):
            return list(self.pipeline.profile(cut.data)["bytes"])

    def any_rank(self, stops: bool) -> bool:
        """Returns whether ``stops`` is true on some rank. Collective over the job."""
        gather = self._job.everyone().all_gather
        return any(self._job.exchange("asking all ranks whether to stop", lambda: gather(stops)))

    def _gather_results(self) -> list[Nest]:
        """Returns the results of the metrics' ``compute``, by replica. Collective with metrics."""
        if not self.metrics:
            return []
        return self.pipeline.from_last_stage(self._counting.results())

    @contextmanager
    def _forward_only(self, rows: int) -> Iterator[int]:
        """Opens a context for forwards without backwards; yields the rows of a micro-batch.

        A micro-batch is larger than in training if a batch would have more micro-batches than in
        training.

        Args:
            rows: The rows of the batch.
        """
        default = self.pipeline.micro_batch_size
        size = self.pipeline.micro_batch_size = max(default, -(-rows // self._steps))
        try:
            with self.precision.computing():
                yield size
        finally:
            self.pipeline.micro_batch_size = default

    @contextmanager
    def _micro_batches(self, count: int) -> Iterator[None]:
        """Opens a context in which the schedule has ``count`` micro-batches."""
        default = self.pipeline.accumulate_steps
        if count == default:
            yield
            return
        self.pipeline.accumulate_steps = count
        try:
            yield
        finally:
            self.pipeline.accumulate_steps = default


def _on_host(losses: Tensor) -> Nest:
    """Returns the losses of micro-batches as a NumPy array; those of 16 bits as the Tensor."""
    return losses.numpy() if losses.dtype in (paddle.float32, paddle.float64) else losses


def _sum_in_order(shares: Nest) -> Nest:
    """Returns a batch's loss: the sum of what each micro-batch adds to it, in their order.

    Args:
        shares: An array or a tensor of shape [micro-batches].
    """
    if isinstance(shares, np.ndarray):
        return np.add.accumulate(shares)[-1:]
    return functools.reduce(operator.add, [shares[n] for n in range(shares.shape[0])])


def _only_number(value: Nest) -> float:
    """Returns the only number of an array or a Tensor."""
    (number,) = value.reshape([-1]).tolist()
    return float(number)


def _require_rows(outputs: Sequence[Tensor], rows: int) -> None:
    """Raises ConfigError for an output that is neither [rows, ..] nor [rows x positions, ..]."""
    for output in outputs:
        if not output.ndim or output.shape[0] % rows:
            raise ConfigError(
                "predict joins the outputs of micro-batches and replicas along their first axis",
                expected=f"outputs that begin with their rows, {rows} in all",
                got=f"a joined output {list(output.shape)}",
                fix="return rows first, as by output.transpose([1, 0, 2]); or predict on one "
                "replica with a batch_size up to micro_batch_size",
            )


def _require_loss_by_shards(
    pipeline: PipelineParallel, loss: Callable[..., Nest] | None, metrics: Sequence[Metric]
) -> None:
    """Raises ConfigError if the loss or a metric needs a vocabulary head's logits as one tensor."""
    if metrics:
        raise ConfigError(
            "metrics count outputs, and no rank has the whole logits of a vocabulary head",
            got=", ".join(type(metric).__name__ for metric in metrics),
            fix="leave metrics out, or the VocabularyHead",
        )
    if loss is not None:
        pipeline.layers.take_loss(loss)
