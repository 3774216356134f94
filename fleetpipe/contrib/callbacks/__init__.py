"""Callbacks that log by epoch or watch a loss, in ``printing.py``, and trackers of experiments.

The trackers write the rows of a run to TensorBoard, Weights & Biases or MLflow. A run that goes on
from a checkpoint continues its record, whose id is kept in the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fleetpipe import atomic_file
from fleetpipe.errors import ConfigError
from fleetpipe.extras import INSTALLED_BY


class TensorBoard:
    """Writes event files of TensorBoard, which hides steps beyond ``step`` of earlier files."""

    package = "tensorboardX"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the figures of a row."""
        for name, value in figures_by_phase(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Writes to a run of wandb in project ``WANDB_PROJECT``; offline, it writes files."""

    package = "wandb"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Begins a run, or resumes the run of the folder if ``step`` is above 0."""
        import wandb

        name = _id_of(folder, self.package) if step else None
        self._run = wandb.init(
            dir=str(folder), name=folder.name, id=name, resume="allow", config=dict(config)
        )
        _note_id(folder, self.package, self._run.id)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the figures of a row."""
        self._run.log(figures_by_phase(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of wandb."""
        self._run.finish()


class MLflow:
    """Writes to a run of MLflow at ``MLFLOW_TRACKING_URI``; without it, to MLflow's own folder."""

    package = "mlflow"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Begins a run, or resumes the run of the folder if ``step`` is above 0."""
        import mlflow

        self._mlflow = mlflow
        name = _id_of(folder, self.package) if step else None
        run = mlflow.start_run(run_id=name, run_name=folder.name)
        if name is None:
            mlflow.log_params(dict(config))
        _note_id(folder, self.package, run.info.run_id)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the figures of a row."""
        self._mlflow.log_metrics(figures_by_phase(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of MLflow."""
        self._mlflow.end_run()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def require_packages(formats: list[str]) -> None:
    """Refuses a tracker whose package is missing. Every rank checks, so that none waits."""
    for name in formats:
        package = TRACKERS[name].package if name in TRACKERS else None
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"the format {name!r} needs {package}",
                fix=f"{INSTALLED_BY[package]}, or leave that format out",
            )


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the figures of a row by name; a list gives ``name/index`` for each of its numbers."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{index}", number) for index, number in enumerate(value))
        elif name not in ("step", "epoch", "phase", "time"):
            yield name, value


def figures_by_phase(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a row under keys such as ``train/loss``."""
    return {f"{row['phase']}/{name}": value for name, value in numbers(row)}


def _id_of(folder: Path, package: str) -> str | None:
    file = folder / f"{package}.id"
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def _note_id(folder: Path, package: str, name: str) -> None:
    atomic_file.replace_text(folder / f"{package}.id", f"{name}\n")
