"""Runs batches of any number of rows on a pipeline, and tells every rank what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.fit.criterion import Criterion, Metric
from fleetpipe.fit.feeding import Rows, in_micro_batches, joined, whole
from fleetpipe.fit.precision import Precision
from fleetpipe.job.job import Job


class Runner:
    """A wrapped model with the loss and the metrics of ``prepare``.

    Its methods that take rows are collective over the job.
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
        """Puts the loss and the metrics into the model.

        Args:
            pipeline: The wrapped model.
            job: The job it is in.
            loss: ``loss(*outputs, *labels)``; None where nothing is trained.
            metrics: They see the outputs of every batch that has labels.
            optimizer: None where nothing is trained.
            precision: In which it computes.
        """
        self.pipeline = pipeline
        self._job = job
        self.optimizer = optimizer
        self._metrics = metrics
        self._precision = precision
        self._criterion = Criterion(loss, metrics, lambda: pipeline.micro_batch_id)
        pipeline.layers.take_loss(self._criterion)
        self._steps = pipeline.accumulate_steps
        #: What each micro-batch of the last training batch had in its loss.
        self.shares: list[float] = []
        #: Number of batches trained so far.
        self.trained = 0

    def train(self, batches: Sequence[Rows]) -> list[float]:
        """Trains on some batches with one step; returns the loss of each.

        Each batch counts as a mean over its rows, and their gradients are added up, as Paddle's
        ``accumulate_grad_batches`` has it.
        """
        cuts = [in_micro_batches(rows, self._steps) for rows in batches]
        cut = joined(cuts)
        # A sum over the micro-batches, where it is asked for, is that many times their mean.
        summed = self.pipeline.weights[0] == 1
        weights = [w * (len(one.rows) if summed else 1) for one in cuts for w in one.weights]
        with self._micro_batches(len(cut.rows)), self._precision.computing():
            self._criterion.begin(cut.rows)
            shares = self.pipeline.train_batch(
                cut.data,
                self.optimizer,
                scaler=self._precision.scaler,
                weights=weights,
                return_micro_batch_loss=True,
            )
        self._count()
        self.shares = shares.tolist()
        losses, start = [], 0
        for one in cuts:
            losses.append(_total(shares[start : start + len(one.rows)]))
            start += len(one.rows)
        return losses

    def evaluate(self, rows: Rows) -> float:
        """Returns the mean loss over the rows that count in all replicas, and has these counted."""
        # One row, which does not count, where this replica has none that does.
        kept = max(rows.real, 1)
        size = self.pipeline.micro_batch_size
        starts = range(0, kept, size)
        self._criterion.begin([max(0, min(size, rows.real - start)) for start in starts])
        inputs, labels = whole(rows.inputs, kept), whole(rows.labels, kept)
        if labels is None:
            labels = [None] * len(starts)
        with self._precision.computing():
            loss = self.pipeline.eval_batch([inputs, labels], compute_loss=True)
        self._count()
        if rows.everywhere == rows.rows * self.pipeline.replicas.ranks:
            return float(loss)
        own = self.pipeline.total_loss
        share = None if own is None else [_total(own[0]) * rows.real]
        everyone = self.pipeline.from_last_stage(share)
        return float(sum(share for (share,) in everyone) / rows.everywhere)

    def predict(self, rows: Rows) -> list[np.ndarray]:
        """Returns the outputs for the rows that count in all replicas, in their order."""
        kept = max(rows.real, 1)
        with self._precision.computing():
            output = self.pipeline.predict_batch(whole(rows.inputs, kept), broadcast=False)
        columns = output if isinstance(output, (list, tuple)) else [output]
        own = None if output is None else [column[: rows.real] for column in columns]
        everyone = self.pipeline.from_last_stage(own)
        return [np.concatenate([part.numpy() for part in parts]) for parts in zip(*everyone)]

    def measured_bytes(self, rows: Rows) -> list[float]:
        """Returns what a forward of one micro-batch leaves allocated in each stage."""
        cut = in_micro_batches(rows, self._steps)
        self._criterion.begin([0] * len(cut.rows))
        with self._micro_batches(len(cut.rows)):
            return list(self.pipeline.profile(cut.data)["bytes"])

    def any_rank(self, wish: bool) -> bool:
        """Returns whether any rank of the job has this wish."""
        with self._job.guarded(lambda: "asking all ranks whether to stop"):
            return any(self._job.everyone().all_gather(wish))

    def _count(self) -> None:
        if self._metrics:
            self._criterion.update(self.pipeline.from_last_stage(self._criterion.computed()))

    @contextmanager
    def _micro_batches(self, count: int) -> Iterator[None]:
        """Within it the schedule has another number of micro-batches."""
        usual = self.pipeline.accumulate_steps
        self.pipeline.accumulate_steps = count
        try:
            yield
        finally:
            self.pipeline.accumulate_steps = usual


def _total(shares: Tensor) -> float:
    """Adds up the shares [micro-batches] one after another, as the loss of a batch is made."""
    total = shares[0]
    for index in range(1, shares.shape[0]):
        total = total + shares[index]
    return float(total)
