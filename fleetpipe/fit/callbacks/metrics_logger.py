"""``MetricsLogger``: writes a run's metrics to files, which a resumed run continues.

Beside the rows it writes ``run.json``, which describes the run, and ``lives.jsonl``, its attempts.
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fleetpipe import atomic_file, version
from fleetpipe.arguments import require_folder
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.extras import extra
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.callbacks.throughput import PER_RANK
from fleetpipe.job import attempt_files, run_files
from fleetpipe.mesh.axes import AXES
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.optimizer import base_optimizer


class Sink(Protocol):
    """An output of rows: each is a dict that has ``step`` and ``phase``."""

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row."""

    def close(self) -> None:
        """Ends the output."""


class MetricsLogger(rank_policy.Callback):
    """Writes losses, metrics, learning rate and gradient norm to files.

    They are ``metrics.jsonl`` and ``metrics.csv``; the norm is there if the optimizer clips by it.

    Beside them stand ``run.json``, with layout, stages, schedule and versions, and ``lives.jsonl``,
    with the begin and the end of each attempt: ``fleetpipe report`` draws them.

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
            folder: Is made if it does not exist.
            log_freq: Training batches from one row to the next.
            formats: One or several of ``"jsonl"``, ``"csv"``, ``"tensorboard"``, ``"wandb"`` and
                ``"mlflow"``; the last three need their packages.
            config: Settings of yours for the record, which ``run.json`` gets.

        Raises:
            ConfigError: A format is none of these, or its package is not installed.
        """
        super().__init__()
        self._folder = Path(folder).absolute()
        self._every = log_freq
        self._formats = [formats] if isinstance(formats, str) else list(formats)
        for name in self._formats:
            if name not in _sinks():
                raise ConfigError(f"there is no format {name!r}", fix=nearest(name, _sinks()))
        extra("callbacks.trackers").require_packages(self._formats)
        self._config = dict(config or {})
        self._sinks: list[Sink] = []
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the files."""
        require_folder("MetricsLogger(folder)", self._folder)
        write_about(self._folder, self.model, self.params, self._config)
        begin_attempt(self._folder, self.model.global_step)
        step = self.model.global_step
        sinks = _sinks()
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
        end_attempt(self._folder, self.model.global_step)

    def _write(self, phase: str, logs: dict[str, Any]) -> None:
        values = {
            name: _plain(name, value)
            for name, value in logs.items()
            if name not in ("step", "batch_size")
        }
        row = {"step": self.model.global_step, "epoch": self._epoch, "phase": phase}
        for sink in self._sinks:
            sink.write({**row, **values, "time": time.time()})


class _JsonLines:
    """One JSON object in each line."""

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        path = folder / run_files.METRICS
        run_files.replace_lines(path, rows_up_to(path, step))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Csv:
    """A CSV table with a row for each figure, as evaluations and batches have different figures."""

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
        whole = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        numbered = ((str(row.get("step")), row) for row in csv.DictReader(io.StringIO(whole)))
        return [row for number, row in numbered if number.isdecimal() and int(number) <= step]

    def write(self, row: dict[str, Any]) -> None:
        keys = {name: row[name] for name in self._COLUMNS[:4]}
        self._table.writerows(
            {**keys, "name": n, "value": v} for n, v in extra("callbacks.trackers").numbers(row)
        )
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _sinks() -> dict[str, Any]:
    """Returns the class of :class:`Sink` for each format."""
    return {"jsonl": _JsonLines, "csv": _Csv, **extra("callbacks.trackers").TRACKERS}


def rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the rows of a ``metrics.jsonl`` up to a step; lines that are no rows are left out."""
    rows = run_files.read_lines(path).values
    return [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= step]


def _plain(name: str, value: Any) -> float | list[float]:
    """Returns a figure as JSON takes it: a number, or a list if there is one for each rank."""
    if isinstance(value, list):
        return list(map(float, value)) if name in PER_RANK else float(value[0])
    return float(value)


#: Each of these changes the bits of a product; nothing else of the environment is written.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
#: Several trainings of one process are one attempt: their lines have this in common.
_PROCESS = uuid.uuid4().hex


def write_about(
    folder: Path, model: Any, params: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Writes ``run.json``.

    Args:
        folder: Of the run.
        model: The :class:`fleetpipe.Model`, prepared.
        params: Paddle's ``params`` of callbacks: epochs, batches of an epoch, names of metrics.
        config: The user's settings; values that JSON does not have are written as their ``str``.

    Raises:
        OSError: It cannot be written.
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
        "environment": {name: os.environ.get(name) for name in _VARIABLES},
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
            # What is let pass by it is met in the first batch.
            "allow": list(job.allow.entries),
        },
        "schedule": {"name": schedule.name, "text": str(schedule)},
        "stages": _stages(model),
        "config": dict(config),
    }
    text = json.dumps(about, indent=1, default=str, skipkeys=True)
    atomic_file.replace_text(folder / run_files.ABOUT, text + "\n")


def begin_attempt(folder: Path, step: int) -> None:
    """Writes the line of ``lives.jsonl`` that says that an attempt begins.

    Args:
        folder: Of the run.
        step: The number of steps done so far. If it is 0 in the first attempt of the job, the lines
            of another run's attempts are dropped.

    Raises:
        OSError: It cannot be written.
    """
    if step == 0 and attempt_files.number() <= 1:
        run_files.replace_lines(folder / run_files.ATTEMPTS, ())
    _tell(folder, "begin", step)
    attempt_files.tell_record(folder)
    extra("view.reporting").record_in(folder)


def end_attempt(folder: Path, step: int) -> None:
    """Writes the line that says that the training ended; raises as :func:`begin_attempt` does."""
    _tell(folder, "end", step, code=0)


def _tell(folder: Path, event: str, step: int, **more: int) -> None:
    line = {"event": event, "life": attempt_files.number(), "time": time.time(), "step": step}
    run_files.append_line(folder / run_files.ATTEMPTS, {**line, "process": _PROCESS, **more})


def _stages(model: Any) -> list[dict[str, Any]]:
    placement = model.pipeline.schedule.placement
    return [
        {
            "stage": part.stage,
            "rank": placement.rank_of(part.stage),
            "layers": [layer.name for layer in part.layers],
            "parameters": part.parameters,
        }
        for part in model.network.counted_partition().stages
    ]
