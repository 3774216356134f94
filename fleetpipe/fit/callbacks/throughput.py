"""``ThroughputMonitor``: samples and tokens a second, the share of the bubble, held activations."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.fit.callbacks import on_ranks
from fleetpipe.schedules import Action, Op


class Busy:
    """An observer of the engine that adds up what actions take, by the rank that it plays."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._spans: defaultdict[int, float] = defaultdict(float)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if not isinstance(op, Action):
            return instruction
        rank = played.rank

        def timed() -> Blocked | None:
            start = time.perf_counter()
            blocked = instruction()
            self._ended[rank] = time.perf_counter()
            self._begun.setdefault(rank, start)
            self._busy[rank] += self._ended[rank] - start
            return blocked

        return timed

    def end_step(self) -> None:
        """Adds the span of a step to the others."""
        for rank, start in self._begun.items():
            self._spans[rank] += self._ended[rank] - start
        self._begun.clear()

    def take(self) -> list[list[float]]:
        """Returns seconds of span and of work of each rank since this was last called."""
        found = [[span, self._busy[rank]] for rank, span in self._spans.items()]
        self._spans.clear()
        self._busy.clear()
        return found


class ThroughputMonitor(on_ranks.Callback):
    """Adds ``samples_per_second`` and its like to the logs of each batch, for other callbacks.

    Put it before the callbacks that shall see them. A figure is that of ``log_freq`` batches.

    Attributes:
        figures: The last figures: ``samples_per_second``, ``tokens_per_second`` (with
            ``tokens_per_sample``), ``bubble_rate`` (on several ranks) and ``peak_held``.
    """

    def __init__(
        self, log_freq: int = 10, tokens_per_sample: int | None = None, verbose: int = 1
    ) -> None:
        """Takes how often to measure.

        Args:
            log_freq: Batches from one figure to the next.
            tokens_per_sample: Length of a sample, where it is text.
            verbose: Whether the first rank prints the figures.
        """
        super().__init__()
        self._every = log_freq
        self._tokens = tokens_per_sample
        self._verbose = verbose
        self._busy = Busy()
        self._watching = False
        self._samples = 0
        self._batches = 0
        self._since = 0.0
        self.figures: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to watch the engine."""
        if not self._watching:
            self.model.pipeline.observe(self._busy)
            self._watching = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count."""
        self._samples = self._batches = 0
        self._since = time.perf_counter()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts the batch. Collective over the job every ``log_freq`` batches."""
        self._busy.end_step()
        self._samples += logs["batch_size"]
        self._batches += 1
        if self._batches == self._every:
            self._measure()
            if self._verbose and self.model.is_rank("first"):
                figures = (f"{name} {value:.4g}" for name, value in self.figures.items())
                on_ranks.say(f"step {step + 1}: {', '.join(figures)}")
            self._samples = self._batches = 0
            self._since = time.perf_counter()
        logs.update(self.figures)

    def _measure(self) -> None:
        rate = self._samples / (time.perf_counter() - self._since)
        self.figures = {"samples_per_second": rate}
        if self._tokens:
            self.figures["tokens_per_second"] = rate * self._tokens
        pipeline = self.model.pipeline
        gathered = self.model.gather([self._busy.take(), max(pipeline.peak_held.values())])
        self.figures["peak_held"] = max(held for _, held in gathered)
        if len(gathered) > 1:
            spans, busy = zip(*(times for taken, _ in gathered for times in taken))
            self.figures["bubble_rate"] = 1 - max(busy) / max(spans)
