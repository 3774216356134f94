"""Callbacks that log by epoch or watch a loss, and trackers of experiments.

``fit`` logs a run as rows: dicts of a step, a phase ("train" or "eval") and figures such as the
loss. The trackers write these rows to TensorBoard, Weights & Biases or MLflow. A run that goes on
from a checkpoint continues its record there, whose id is in a file of the run directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fleetpipe import atomic_file
from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph import tensors_of
from fleetpipe.errors import BoundaryError, ConfigError, require_whole
from fleetpipe.extras import INSTALLED_BY
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.paddle_api import paddle


class TensorBoard:
    """Writes event files of TensorBoard.

    A run that goes on from ``step`` hides the later steps that an earlier attempt has logged.
    """

    package = "tensorboardX"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the figures of a row of the log as events of TensorBoard."""
        for name, value in figures_by_phase(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Writes to a run of wandb in the project that ``WANDB_PROJECT`` names; offline, to files."""

    package = "wandb"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Begins a run of wandb, or resumes that of the folder if ``step`` is above 0."""
        import wandb

        name = _read_run_id(folder, self.package) if step else None
        self._run = wandb.init(
            dir=str(folder), name=folder.name, id=name, resume="allow", config=dict(config)
        )
        _write_run_id(folder, self.package, self._run.id)

    def write(self, row: dict[str, Any]) -> None:
        """Sends the figures of a row of the log to wandb."""
        self._run.log(figures_by_phase(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of wandb."""
        self._run.finish()


class MLflow:
    """Writes to a run of MLflow at ``MLFLOW_TRACKING_URI``; without it, to MLflow's own folder."""

    package = "mlflow"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Begins a run of MLflow, or resumes that of the folder if ``step`` is above 0."""
        import mlflow

        self._mlflow = mlflow
        name = _read_run_id(folder, self.package) if step else None
        run = mlflow.start_run(run_id=name, run_name=folder.name)
        if name is None:
            mlflow.log_params(dict(config))
        _write_run_id(folder, self.package, run.info.run_id)

    def write(self, row: dict[str, Any]) -> None:
        """Sends the figures of a row of the log to MLflow."""
        self._mlflow.log_metrics(figures_by_phase(row), step=row["step"])

    def close(self) -> None:
        """Ends the run of MLflow."""
        self._mlflow.end_run()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def require_packages(formats: list[str]) -> None:
    """Raises ConfigError if a tracker among ``formats`` needs a package that is not installed.

    Every rank calls this, though only one logs: if that one failed alone, the others would wait.
    """
    for name in formats:
        package = TRACKERS[name].package if name in TRACKERS else None
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"the format {name!r} needs {package}",
                fix=f"{INSTALLED_BY[package]}, or leave that format out",
            )


def iterate_figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the name and value of each figure in a row of the log.

    Of a list, such as the loss of each micro-batch, each number has the name ``name/index``.
    """
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{index}", number) for index, number in enumerate(value))
        elif name not in ("step", "epoch", "phase", "time"):
            yield name, value


def figures_by_phase(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a row under keys such as ``train/loss``."""
    return {f"{row['phase']}/{name}": value for name, value in iterate_figures(row)}


def _read_run_id(folder: Path, package: str) -> str | None:
    """Returns the id of a run in a tracker, from its file in the run directory; None without it."""
    file = folder / f"{package}.id"
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def _write_run_id(folder: Path, package: str, run_id: str) -> None:
    atomic_file.replace_text(folder / f"{package}.id", f"{run_id}\n")


class LogMetricByEpoch(rank_policy.Callback):
    """Prints the mean loss, the metrics and the learning rate of each epoch on the first rank.

    The lines are those of ColossalAI's hook of this name in its tutorial, but epochs count from 1,
    as in all of fleetpipe's texts: ``[Epoch 1 / Train]: Loss = 1.2345 | LR = 0.001``.
    """

    def __init__(self, digits: int = 5) -> None:
        super().__init__()
        self._digits = digits
        self._epoch = 0
        self._losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the number of the epoch, and drops the losses of the last one."""
        self._epoch = epoch
        self._losses = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Adds the loss of the batch to those of the epoch."""
        self._losses += logs["loss"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints the line for the training of the epoch."""
        self._print("Train", logs, {"LR": self.model.learning_rate})

    def on_eval_end(self, logs: Any = None) -> None:
        """Prints the line for the evaluation of the epoch."""
        self._losses = logs.get("loss", [])
        self._print("Test", logs, {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses of the epoch so far."""
        return {"losses": self._losses}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the losses of an epoch that is resumed in its middle."""
        self._losses = state["losses"]

    def _print(self, phase: str, logs: Any, more: dict[str, float]) -> None:
        """Prints a line with the mean loss, the metrics in ``logs``, and ``more`` figures."""
        if not self.model.is_rank("first"):
            return
        metrics = {name: logs[name] for name in self.model.metric_names if name != "loss"}
        loss = {"Loss": sum(self._losses) / len(self._losses)} if self._losses else {}
        values = {**loss, **metrics, **more}
        text = " | ".join(f"{name} = {value:.{self._digits}g}" for name, value in values.items())
        rank_policy.say(f"[Epoch {self._epoch + 1} / {phase}]: {text}")


class LossMonitor(rank_policy.Callback):
    """Prints the loss on the first rank; a loss that is NaN or Inf is an error on every rank.

    MindSpore's callback of this name does the same (tutorial on pipeline parallelism, r1.6), but
    there each rank sees another value.
    """

    def __init__(self, per_print_times: int = 1, find_layer: bool = False) -> None:
        """Sets how often the loss is printed.

        Args:
            per_print_times: Batches from one line to the next; 0 for no lines.
            find_layer: Whether to look at the output of every layer, so that the error can name the
                first layer with a NaN or Inf. This takes time.

        Raises:
            ConfigError: ``per_print_times`` is no whole number of at least 0.
        """
        super().__init__()
        fix = "LossMonitor(1) prints the loss of every batch, LossMonitor(0) none"
        self._every = require_whole("per_print_times", per_print_times, 0, fix=fix)
        self._find_layer = find_layer
        self._epoch = 0
        self._batches = 0
        self._hooks: list[Any] = []
        #: Micro-batch, stage rank and layer of this rank's first output with a NaN or Inf.
        self._first_not_finite: list[Any] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts a hook on each layer of this rank if ``find_layer`` is set."""
        if self._find_layer:
            for name, layer in self.model.network.named_sublayers():
                hook = layer.register_forward_post_hook(self._hook_for(name))
                self._hooks.append(hook)

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Prints the loss, and raises an error if it is not finite.

        Raises:
            BoundaryError: The loss is NaN or Inf.
        """
        (loss,) = logs["loss"]
        if not math.isfinite(loss):
            self._raise_not_finite(step, loss)
        self._batches += 1
        if self._every and self._batches % self._every == 0 and self.model.is_rank("first"):
            rank_policy.say(f"epoch: {self._epoch + 1} step: {step + 1}, loss is {loss}")

    def _raise_not_finite(self, step: int, loss: float) -> None:
        """Raises the error for a loss that is NaN or Inf. Collective, to find the first layer."""
        losses = self.model.micro_batch_losses
        number = next(i for i, share in enumerate(losses) if not math.isfinite(share))
        where = f"epoch {self._epoch + 1}, step {step + 1}, micro-batch {number}"
        of_ranks = [first for first in self.model.gather(self._first_not_finite) if first]
        if of_ranks:
            _, stage_rank, layer = min(of_ranks)
            where += f", layer {layer!r} of stage rank {stage_rank}"
        raise BoundaryError(
            f"the loss is {loss}",
            where=where,
            cause="a too large learning rate, a product that passed the dtype's range, or such "
            "numbers in the data",
            fix="lower the learning rate, or clip gradients"
            if self._find_layer
            else "LossMonitor(find_layer=True) names the layer that has it first",
        )

    def _hook_for(self, name: str) -> Any:
        """Returns the hook that looks for a NaN or Inf in each output of the layer ``name``."""

        def note_if_not_finite(_layer: Layer, _inputs: Nest, output: Nest) -> None:
            if self._first_not_finite is None and not all(
                bool(paddle.isfinite(tensor).all())
                for tensor in tensors_of(output)
                if tensor.is_floating_point()
            ):
                pipeline = self.model.pipeline
                self._first_not_finite = [pipeline.micro_batch_id, pipeline.stage_id, name]

        return note_if_not_finite
