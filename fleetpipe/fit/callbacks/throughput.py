"""``ThroughputMonitor``: measures samples and tokens a second, bubble rate and memory."""

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
    """An observer of the engine that adds up the time that actions take on each rank."""

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
        """Adds the span of a step to the sum."""
        for rank, start in self._begun.items():
            self._spans[rank] += self._ended[rank] - start
        self._begun.clear()

    def take(self) -> list[tuple[int, float, float]]:
        """Returns (rank, seconds of span, seconds of work) of each rank since the last call."""
        times = [(rank, span, self._busy[rank]) for rank, span in self._spans.items()]
        self._spans.clear()
        self._busy.clear()
        return times


class ThroughputMonitor(rank_policy.Callback):
    """Adds ``samples_per_second`` and similar figures to the logs, for other callbacks.

    Put it before the callbacks that shall see them. A figure is measured over ``log_freq`` batches.

    Attributes:
        figures: The last figures: ``samples_per_second``, ``tokens_per_second`` (with
            ``tokens_per_sample``), ``bubble_rate`` (if there is a busy share) and ``peak_held``.
        by_rank: The last figures that are lists: ``held_by_rank``, the most activations that each
            rank of the pipeline held; ``busy_share_by_rank``, the share of the step in which each
            computed (only on several ranks; of replicas the busiest; not on a GPU, where a trace
            has it); and ``peak_memory_by_process``, bytes of each process of the job: on a GPU the
            most that Paddle allocated, else the most resident memory, libraries included.
    """

    def __init__(
        self, log_freq: int = 10, tokens_per_sample: int | None = None, verbose: int = 1
    ) -> None:
        """Configures how often to measure.

        Args:
            log_freq: Batches from one figure to the next.
            tokens_per_sample: Length of a sample of text; None measures no tokens.
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
        """Makes the engine report actions, on a CPU."""
        if not self._watching and device_kind() == "cpu":
            self.model.pipeline.observe(self._busy)
            self._watching = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the counts."""
        self._samples = self._batches = 0
        self._since = self._now()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts the batch; measures every ``log_freq`` batches. Collective over the job then."""
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
    """Returns the peak memory of this process in bytes: of the GPU if there is one.

    Else the most resident memory; 0 if the system does not report it, as on Windows.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    return systems.resident_bytes(peak=True)
