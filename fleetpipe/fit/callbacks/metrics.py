"""Defines callbacks that measure a run: ``ThroughputMonitor``, ``TraceSteps``, ``MetricsLogger``.

``ThroughputMonitor`` measures samples and tokens a second, bubble rate and memory. ``TraceSteps``
draws the actions of a few steps beside the prediction. ``MetricsLogger`` writes a run's metrics to
files, which a resumed run continues, ``run.json``, which describes the run, and ``lives.jsonl``,
which lists its attempts.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fleetpipe import atomic_file, systems, version
from fleetpipe.arguments import require_folder
from fleetpipe.engine.observer import Instruction, Played, Stopwatch
from fleetpipe.engine.trace import Trace
from fleetpipe.errors import ConfigError, is_whole_number, nearest
from fleetpipe.extras import extra
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.job import attempt_files, run_files
from fleetpipe.mesh.axes import AXES
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_clock, device_kind
from fleetpipe.paddle_api.optimizer import base_optimizer
from fleetpipe.schedules import Action, Op

#: The metrics that are lists, with a number for each rank of the pipeline or for each process.
PER_RANK = ("held_by_rank", "busy_share_by_rank", "peak_memory_by_process")

#: The environment variables that ``run.json`` has: they change the bits of a matrix product.
_BIT_VARIABLES = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
#: A random name of this process, by which the lines of its trainings count as one attempt.
_PROCESS = uuid.uuid4().hex


class TraceSteps(rank_policy.Callback):
    """Records every action and transfer of some batches in the first replica.

    After the last of them the first rank writes ``trace.json`` for Perfetto and, with matplotlib,
    ``predicted.png`` and ``measured.png``, and prints the bubble rate.
    """

    def __init__(
        self, steps: Collection[int] = (10, 11), folder: str | os.PathLike[str] = "trace"
    ) -> None:
        """Configures which batches to record.

        Args:
            steps: The numbers of the batches, counted from 1 through all epochs; the first batch of
                a run is slower than others.
            folder: The folder in which the first rank writes.

        Raises:
            ConfigError: ``steps`` is empty, or has a number below 1.
        """
        super().__init__()
        if not steps or not all(map(is_whole_number, steps)):
            raise ConfigError(
                "steps are numbers of batches, from 1",
                got=repr(steps),
                fix="TraceSteps(steps=[10, 11])",
            )
        self._steps = set(steps)
        self._folder = Path(folder).absolute()
        self._trace: Trace | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the engine report to the trace. Collective over the pipeline."""
        job = self.model.pipeline.require_running()
        if self._trace is None and job.leads("pp"):
            schedule = self.model.pipeline.schedule
            ranks, group = job.connect(), job.group()
            self._trace = Trace(self._folder, schedule, ranks, group, progress=job.progress)
            self.model.pipeline.observe(self._trace)

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Starts to record if the batch is one of ``steps``."""
        if self._trace is not None and self.model.global_step + 1 in self._steps:
            self._trace.begin_step()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Ends the record of a batch of ``steps``, which is collective over the pipeline."""
        number = self.model.global_step
        if self._trace is None or number not in self._steps:
            return
        self._trace.end_step(number)
        if number == max(self._steps):
            summary = self._trace.write()
            if summary is not None:
                rank_policy.say(summary)


class BusyTimes:
    """An observer of the engine that adds up the time that actions take on each rank."""

    def __init__(self) -> None:
        # By rank: the begin and the end of the step's actions; seconds since the last take_times().
        self._begins: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._busy: defaultdict[int, float] = defaultdict(float)
        self._spans: defaultdict[int, float] = defaultdict(float)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an instruction of the engine that also measures the time of its action."""
        if not isinstance(op, Action):
            return instruction
        rank = played.rank

        def add_action_time(begin: float, end: float) -> None:
            self._begins.setdefault(rank, begin)
            self._ends[rank] = end
            self._busy[rank] += end - begin

        return Stopwatch(instruction, add_action_time)

    def end_step(self) -> None:
        """Adds the span of a step, from its first action to its last, to the sum of each rank."""
        for rank, start in self._begins.items():
            self._spans[rank] += self._ends[rank] - start
        self._begins.clear()

    def take_times(self) -> list[tuple[int, float, float]]:
        """Returns the times of each rank since the last call: (rank, seconds of span, of work)."""
        times = [(rank, span, self._busy[rank]) for rank, span in self._spans.items()]
        self._spans.clear()
        self._busy.clear()
        return times


class ThroughputMonitor(rank_policy.Callback):
    """Adds ``samples_per_second`` and similar figures to the logs, for the callbacks after it.

    Figures are measured over ``log_freq`` batches.

    Attributes:
        figures: The last figures: ``samples_per_second``, ``tokens_per_second`` (with
            ``tokens_per_sample``), ``bubble_rate`` (if there is a busy share) and ``peak_held``.
        by_rank: The last figures that are lists: ``held_by_rank``, the most activations in flight
            on each rank of the pipeline; ``busy_share_by_rank``, the share of the step in which
            each rank computed (only on several ranks; for replicas the busiest; not on a GPU, where
            a trace shows it); and ``peak_memory_by_process``, bytes of each process of the job: on
            a GPU the most that Paddle allocated, else the most resident memory, libraries included.
    """

    def __init__(
        self, log_freq: int = 10, tokens_per_sample: int | None = None, verbose: int = 1
    ) -> None:
        """Configures how often to measure.

        Args:
            log_freq: Batches from one measurement to the next.
            tokens_per_sample: Length of a sample of text; None measures no tokens.
            verbose: Whether the first rank prints the figures.
        """
        super().__init__()
        self._every = log_freq
        self._tokens = tokens_per_sample
        self._verbose = verbose
        self._busy = BusyTimes()
        self._clock = device_clock()
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
        self._since = self._clock()

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
            self._since = self._clock()
        logs.update(self.figures, **self.by_rank)

    def _measure(self) -> None:
        """Sets the figures of the batches since the last measurement. Collective over the job."""
        rate = self._samples / (self._clock() - self._since)
        self.figures = {"samples_per_second": rate}
        if self._tokens:
            self.figures["tokens_per_second"] = rate * self._tokens
        held = self.model.pipeline.peak_held
        counts_by_rank = {str(rank): count for rank, count in held.items()}
        gathered = self.model.gather([self._busy.take_times(), counts_by_rank, peak_memory()])
        most: defaultdict[int, int] = defaultdict(int)
        for _, counts, _ in gathered:
            for rank, count in counts.items():
                most[int(rank)] = max(most[int(rank)], count)
        self.figures["peak_held"] = max(most.values())
        self.by_rank = {
            "held_by_rank": [most[rank] for rank in sorted(most)],
            "peak_memory_by_process": [memory for _, _, memory in gathered],
        }
        times = [time for process_times, _, _ in gathered for time in process_times]
        if len(gathered) > 1 and times:
            span = max(seconds for _, seconds, _ in times)
            busy: defaultdict[int, float] = defaultdict(float)
            for rank, _, seconds in times:
                busy[rank] = max(busy[rank], seconds)
            self.figures["bubble_rate"] = 1 - max(busy.values()) / span
            self.by_rank["busy_share_by_rank"] = [busy[rank] / span for rank in sorted(busy)]


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes, on a GPU the memory of the GPU.

    The result is 0 if the system does not report this, such as on Windows.
    """
    if device_kind() == "gpu":
        return int(paddle.device.cuda.max_memory_allocated())
    return systems.resident_bytes(peak=True)


class Sink(Protocol):
    """Writes rows of metrics, which are dicts with ``step`` and ``phase``, in one format."""

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row."""

    def close(self) -> None:
        """Closes the file or the connection; no row follows."""


class MetricsLogger(rank_policy.Callback):
    """Writes losses, metrics, learning rate and gradient norm to files.

    The files are ``metrics.jsonl`` and ``metrics.csv``; the norm is written if the optimizer clips
    by it. It also writes ``run.json``, with layout, stages, schedule and versions, and
    ``lives.jsonl``, with the begin and the end of each attempt: ``fleetpipe report`` draws them.

    The first rank of the job writes. A run that resumes from a checkpoint continues the same files,
    without the rows of steps after the checkpoint.
    """

    on_rank = "first"

    def __init__(
        self,
        folder: str | Path,
        log_freq: int = 1,
        formats: str | Iterable[str] = ("jsonl", "csv"),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Configures where and what to write.

        Args:
            folder: The folder for the files, which is created if it does not exist.
            log_freq: Training batches from one row to the next.
            formats: One or several of ``"jsonl"``, ``"csv"``, ``"tensorboard"``, ``"wandb"`` and
                ``"mlflow"``; the last three need their packages.
            config: Your own settings, which are written into ``run.json``.

        Raises:
            ConfigError: A format is none of these, or its package is not installed.
        """
        super().__init__()
        self._folder = Path(folder).absolute()
        self._every = log_freq
        self._formats = [formats] if isinstance(formats, str) else list(formats)
        for name in self._formats:
            if name not in _writers_by_format():
                raise ConfigError(
                    f"there is no format {name!r}", fix=nearest(name, _writers_by_format())
                )
        extra("callbacks").require_packages(self._formats)
        self._config = dict(config or {})
        self._sinks: list[Sink] = []
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the files."""
        require_folder("MetricsLogger(folder)", self._folder)
        write_about(self._folder, self.model, self.params, self._config)
        begin_attempt(self._folder, self.model.global_step)
        step = self.model.global_step
        sinks = _writers_by_format()
        self._sinks = [sinks[name](self._folder, step, self._config) for name in self._formats]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the epoch's number for the rows."""
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Writes a row every ``log_freq`` batches."""
        if self.model.global_step % self._every == 0:
            norm = self.model.gradient_norm
            norms = {} if norm is None else {"gradient_norm": norm}
            self._write("train", {**logs, "learning_rate": self.model.learning_rate, **norms})

    def on_eval_end(self, logs: Any = None) -> None:
        """Writes the row of an evaluation."""
        self._write("eval", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        _append_line(self._folder, "end", self.model.global_step, code=0)

    def _write(self, phase: str, logs: dict[str, Any]) -> None:
        """Writes the logs as a row of every format; ``phase`` is "train" or "eval"."""
        values = {
            name: _to_json_number(name, value)
            for name, value in logs.items()
            if name not in ("step", "batch_size")
        }
        row = {"step": self.model.global_step, "epoch": self._epoch, "phase": phase}
        for sink in self._sinks:
            sink.write({**row, **values, "time": time.time()})


class _JsonLines:
    """Writes one JSON object in each line of ``metrics.jsonl``."""

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        path = folder / run_files.METRICS
        rows = run_files.read_lines(path).values  # without lines that are no rows
        earlier = [r for r in rows if isinstance(r.get("step"), int) and r["step"] <= step]
        run_files.replace_lines(path, earlier)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row as one line."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Csv:
    """Writes a CSV table with a row for each number, since not all steps have the same numbers."""

    _COLUMNS = ("step", "epoch", "phase", "time", "name", "value")

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        path = folder / "metrics.csv"
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._COLUMNS, extrasaction="ignore")
        table.writeheader()
        table.writerows(self._rows_up_to(path, step))
        atomic_file.replace_text(path, text.getvalue())
        self._file = path.open("a", encoding="utf-8", newline="")
        self._table = csv.DictWriter(self._file, self._COLUMNS)

    @staticmethod
    def _rows_up_to(path: Path, step: int) -> list[dict[str, str]]:
        """Returns the rows up to a step; an unfinished last line is left out."""
        if not path.exists():
            return []
        finished, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        numbered = ((str(row.get("step")), row) for row in csv.DictReader(io.StringIO(finished)))
        return [row for number, row in numbered if number.isdecimal() and int(number) <= step]

    def write(self, row: dict[str, Any]) -> None:
        """Writes a line for each number of a row."""
        keys = {name: row[name] for name in self._COLUMNS[:4]}
        self._table.writerows(
            {**keys, "name": n, "value": v} for n, v in extra("callbacks").iterate_figures(row)
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _writers_by_format() -> dict[str, Any]:
    """Returns the class of :class:`Sink` for each format, by the format's name."""
    return {"jsonl": _JsonLines, "csv": _Csv, **extra("callbacks").TRACKERS}


def _to_json_number(name: str, value: Any) -> float | list[float]:
    """Returns a metric's number for JSON, or a list if the metric has a number for each rank."""
    if isinstance(value, list):
        return list(map(float, value)) if name in PER_RANK else float(value[0])
    return float(value)


def write_about(
    folder: Path, model: Any, params: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Writes ``run.json``, which describes a run: layout, versions, schedule, stages, settings.

    Args:
        folder: The folder of the run.
        model: The :class:`fleetpipe.Model`, prepared.
        params: Paddle's ``params`` of callbacks: epochs, batches of an epoch, names of metrics.
        config: The user's settings; values that JSON does not have are written as their ``str``.

    Raises:
        OSError: The file cannot be written.
    """
    schedule, job = model.pipeline.schedule, model.pipeline.require_running()
    degrees = job.degrees
    about = {
        "written": time.time(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {
            "fleetpipe": version.__version__,
            "paddlepaddle": paddle.version.full_version,
            "numpy": np.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        "environment": {name: os.environ.get(name) for name in _BIT_VARIABLES},
        "layout": {
            "processes": job.everyone().ranks,
            **{axis: degrees.split(axis) for axis in AXES},
            "device": device_kind(),
        },
        "training": {
            "epochs": params.get("epochs"),
            "batches_per_epoch": params.get("steps"),
            "micro_batches": model.pipeline.accumulate_steps,
            "micro_batch_size": model.pipeline.micro_batch_size,
            "optimizer": type(base_optimizer(model.optimizer)).__name__,
            "learning_rate": model.learning_rate,
            "metrics": list(params.get("metrics") or ()),
            # The entries as the user gave them: the first batch shows which are used.
            "allow": list(job.allow.entries),
        },
        "schedule": {"name": schedule.name, "text": str(schedule)},
        "stages": [
            {
                "stage": part.stage,
                "rank": schedule.placement.rank_of(part.stage),
                "layers": [layer.name for layer in part.layers],
                "parameters": part.parameters,
            }
            for part in model.network.counted_partition().stages
        ],
        "config": dict(config),
    }
    text = json.dumps(about, indent=1, default=str, skipkeys=True)
    atomic_file.replace_text(folder / run_files.ABOUT, text + "\n")


def begin_attempt(folder: Path, step: int) -> None:
    """Writes the line of ``lives.jsonl`` for the begin of an attempt.

    Args:
        folder: The folder of the run.
        step: The number of steps done so far. If it is 0 in the first attempt of the job, the lines
            of another run's attempts are dropped.

    Raises:
        OSError: The file cannot be written.
    """
    if step == 0 and attempt_files.number() <= 1:
        run_files.replace_lines(folder / run_files.ATTEMPTS, ())
    _append_line(folder, "begin", step)
    attempt_files.tell_record(folder)
    extra("view.reporting").record_in(folder)


def _append_line(folder: Path, event: str, step: int, **more: int) -> None:
    """Appends the begin or the end of this attempt of the job to ``lives.jsonl``."""
    line = {"event": event, "life": attempt_files.number(), "time": time.time(), "step": step}
    run_files.append_line(folder / run_files.ATTEMPTS, {**line, "process": _PROCESS, **more})
