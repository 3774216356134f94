"""``ThroughputMonitor``: samples and tokens a second, the share of the bubble, memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fleetpipe import systems
from fleetpipe.engine.observer import Instruction, Played
from fleetpipe.engine.stopwatch import Stopwatch
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_clock, device_kind
from fleetpipe.schedules import Action, Op

#: Figures that are lists: one number for each rank of the pipeline, one for each process.
PER_RANK = ("held_by_rank", "busy_share_by_rank", "peak_memory_by_process")


class Busy:
    """An observer of the engine that adds up what actions take, by the rank that it plays."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._spans: defaultdict[int, float] = defaultdict(float)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if not isinstance(op, Action):
            return instruction
        rank = played.rank

        def add(begin: float, end: float) -> None:
            self._begun.setdefault(rank, begin)
            self._ended[rank] = end
            self._busy[rank] += end - begin

        return Stopwatch(instruction, add)

    def end_step(self) -> None:
        """Adds the span of a step to the others."""
        for rank, start in self._begun.items():
            self._spans[rank] += self._ended[rank] - start
        self._begun.clear()

    def take(self) -> list[tuple[int, float, float]]:
        """Returns each rank, and its seconds of span and of work since this was last called."""
        times = [(rank, span, self._busy[rank]) for rank, span in self._spans.items()]
        self._spans.clear()
        self._busy.clear()
        return times


class ThroughputMonitor(rank_policy.Callback):
    """Adds ``samples_per_second`` and its like to the logs of each batch, for other callbacks.

    Put it before the callbacks that shall see them. A figure is that of ``log_freq`` batches.

    Attributes:
        figures: The last figures: ``samples_per_second``, ``tokens_per_second`` (with
            ``tokens_per_sample``), ``bubble_rate`` (where there is a busy share) and ``peak_held``.
        by_rank: Likewise, in lists: ``held_by_rank``, the most forwards that each rank of the
            pipeline held; ``busy_share_by_rank``, the share of the step in which each computed (on
            several ranks; of replicas the busiest; not on a GPU, where a trace has it); and
            ``peak_memory_by_process``, bytes of each process of the job: on a GPU what Paddle
            allocated at most, else the most resident memory, libraries included.
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
        self._now = device_clock()
        self._watching = False
        self._samples = 0
        self._batches = 0
        self._since = 0.0
        self.figures: dict[str, float] = {}
        self.by_rank: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to watch the engine."""
        if not self._watching and device_kind() == "cpu":
            self.model.pipeline.observe(self._busy)
            self._watching = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count."""
        self._samples = self._batches = 0
        self._since = self._now()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts the batch. Collective over the job every ``log_freq`` batches."""
        self._busy.end_step()
        self._samples += logs["batch_size"]
        self._batches += 1
        if self._batches == self._every:
            self._measure()
            if self._verbose and self.model.is_rank("first"):
                figures = (f"{name} {value:.4g}" for name, value in self.figures.items())
                rank_policy.say(f"step {step + 1}: {', '.join(figures)}")
            self._samples = self._batches = 0
            self._since = self._now()
        logs.update(self.figures, **self.by_rank)

    def _measure(self) -> None:
        rate = self._samples / (self._now() - self._since)
        self.figures = {"samples_per_second": rate}
        if self._tokens:
            self.figures["tokens_per_second"] = rate * self._tokens
        held = self.model.pipeline.peak_held
        counts_by_rank = {str(rank): count for rank, count in held.items()}
        gathered = self.model.gather([self._busy.take(), counts_by_rank, peak_memory()])
        most: defaultdict[int, int] = defaultdict(int)
        for _, counts, _ in gathered:
            for rank, count in counts.items():
                most[int(rank)] = max(most[int(rank)], count)
        self.figures["peak_held"] = max(most.values())
        self.by_rank = {
            "held_by_rank": [most[rank] for rank in sorted(most)],
            "peak_memory_by_process": [memory for _, _, memory in gathered],
        }
        times = [each for taken, _, _ in gathered for each in taken]
        if len(gathered) > 1 and times:
            span = max(seconds for _, seconds, _ in times)
            busy: defaultdict[int, float] = defaultdict(float)
            for rank, _, seconds in times:
                busy[rank] = max(busy[rank], seconds)
            self.figures["bubble_rate"] = 1 - max(busy.values()) / span
            self.by_rank["busy_share_by_rank"] = [busy[rank] / span for rank in sorted(busy)]


def peak_memory() -> int:
    """Returns the most bytes that this process had: of the GPU's memory where it has one.

    Else what the system counts as resident; 0 where that is not told, as on Windows.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    return systems.resident_bytes(peak=True)
