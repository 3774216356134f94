"""The records of a run: ``run.json``, what runs, and ``lives.jsonl``, its attempts."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import atomic_file, version
from fleetpipe.fit.networks import required_job
from fleetpipe.job import attempt_files, reporting
from fleetpipe.mesh.axes import AXES
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.optimizer import base_optimizer
from fleetpipe.report import files

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
        params: What Paddle tells callbacks: epochs, batches of an epoch, names of metrics.
        config: What the user wants to have written; what is no value of JSON as its text.

    Raises:
        OSError: It cannot be written.
    """
    schedule, job = model.pipeline.schedule, required_job()
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
        },
        "schedule": {"name": schedule.name, "text": str(schedule)},
        "stages": _stages(model),
        "config": dict(config),
    }
    text = json.dumps(about, indent=1, default=str, skipkeys=True)
    atomic_file.replace_text(folder / files.ABOUT, text + "\n")


def begin_attempt(folder: Path, step: int) -> None:
    """Writes that the run begins, or goes on.

    Args:
        folder: Of the run.
        step: How many steps it has behind it. Where that is none, and no earlier attempt of the
            job began it, what the folder has of another run's attempts is dropped.

    Raises:
        OSError: It cannot be written.
    """
    if step == 0 and attempt_files.number() <= 1:
        files.replace_lines(folder / files.ATTEMPTS, ())
    _tell(folder, "begin", step)
    attempt_files.tell_record(folder)
    reporting.record_in(folder)


def end_attempt(folder: Path, step: int) -> None:
    """Writes that the training came to its end; raises as :func:`begin_attempt` does."""
    _tell(folder, "end", step, code=0)


def _tell(folder: Path, event: str, step: int, **more: int) -> None:
    line = {"event": event, "life": attempt_files.number(), "time": time.time(), "step": step}
    files.append_line(folder / files.ATTEMPTS, {**line, "process": _PROCESS, **more})


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
