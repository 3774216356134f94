"""``train``: ``Model`` captures, cuts and trains a ``PipelineCell``, by ``fleetpipe.Model.fit``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fleetpipe import fleet
from fleetpipe.aliases import Layer, Nest, Optimizer
from fleetpipe.capture.api import pipeline
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.running.variants import StagedCapture
from fleetpipe.contrib.callbacks import LossMonitor
from fleetpipe.contrib.compat.mindspore import context, nn
from fleetpipe.contrib.compat.mindspore.train import callback
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.errors import ConfigError, StateError, UsageError
from fleetpipe.fit.model import Model as Trainer
from fleetpipe.job.job import Job
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.forms import events_of, write_trace

__all__ = ["Model", "callback"]


class Model:
    """Trains a network with its optimizer, with the methods of MindSpore's ``Model``."""

    def __init__(self, network: nn.PipelineCell, optimizer: Optimizer = None) -> None:
        """Takes a network and its optimizer.

        Args:
            network: The network, its loss and the number of micro-batches.
            optimizer: A Paddle optimizer on ``net.infer_param_pipeline_stage()``.

        Raises:
            UsageError: ``network`` is no PipelineCell.
        """
        if not isinstance(network, nn.PipelineCell):
            raise UsageError(
                "Model takes a network that is cut into micro-batches",
                got=type(network).__name__,
                fix="Model(nn.PipelineCell(nn.WithLossCell(net, loss), 4), optimizer=opt)",
            )
        self._cell = network
        self._optimizer = optimizer
        self._trainer: Trainer | None = None
        self._data: PeekedData | None = None

    @property
    def train_network(self) -> nn.PipelineCell:
        """The cell that the model trains."""
        return self._cell

    @property
    def pipeline(self) -> PipelineParallel:
        """The wrapped pipeline.

        Raises:
            StateError: Neither :meth:`build` nor :meth:`train` was called.
        """
        return self._require_trainer().pipeline

    def build(self, train_dataset: Iterable[Nest]) -> None:
        """Captures the network on the first batch, cuts it and wraps it. Collective over the job.

        Args:
            train_dataset: Yields batches ``(inputs, labels)`` of this replica, anew each time that
                it is iterated over.

        Raises:
            CaptureError: The network cannot be captured.
            ConfigError: ``micro_size`` does not divide the rows, or a parameter is used in a stage
                that it was not declared for.
            UsageError: ``train_dataset`` is an iterator, or its items are no batches.
        """
        self._data = PeekedData(train_dataset)
        inputs = self._data.first[0]
        size = self._cell.micro_size
        rows = next((int(t.shape[0]) for t in tensors_of(inputs) if t.ndim), 0)
        rows = nn.rows_of_micro_batch(rows, size)
        options = context.options()
        job = context.job()
        fleet.init(is_collective=True, strategy=options.strategy(size, rows))
        network = self._cell.network.backbone_network
        example = map_tensors(lambda tensor: tensor[:rows], inputs)
        loss = self._cell.network.loss_fn
        # Not verify="first", which would keep the whole model on each rank.
        captured = pipeline(network, example, loss, nn.stages_of_layers(network), verify=True)
        _require_declared(captured, network)
        self._trainer = Trainer(captured)
        self._trainer.prepare(self._optimizer, loss)
        if options.save_graphs:
            schedule = self._trainer.pipeline.schedule
            save(captured, schedule, job, options.save_graphs_path)

    def train(
        self,
        epoch: int,
        train_dataset: Iterable[Nest],
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
    ) -> None:
        """Trains for some epochs. Collective over the job.

        Args:
            epoch: Passes over the data.
            train_dataset: As for :meth:`build`.
            callbacks: One of ``fleetpipe.callbacks`` or ``paddle.callbacks``, or a list of them.
            dataset_sink_mode: Accepted without effect.

        Raises:
            ConfigError: ``epoch`` is below 1, or see :meth:`build`.
            UsageError: ``epoch`` is no int, there is no optimizer, or see :meth:`build`.
            BoundaryError: A loss is NaN or Inf; on every rank.
        """
        rule, fix = "epoch is a number of passes, at least 1", "model.train(10, dataset)"
        context.require_number("epoch", epoch, 1, rule, fix)
        if self._optimizer is None:
            raise UsageError(
                "there is no optimizer to train with",
                fix="Model(net_pipeline, optimizer=opt), with an optimizer of Paddle's on "
                "net.infer_param_pipeline_stage()",
            )
        if self._trainer is None:
            self.build(train_dataset)
        peeked = self._data is not None and self._data.dataset is train_dataset
        data = self._data if peeked else train_dataset
        listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        # LossMonitor ends the training at a NaN.
        all_callbacks = [*(one for one in listed if one is not None), LossMonitor(0)]
        self._require_trainer().fit(data, epochs=epoch, callbacks=all_callbacks, verbose=0)

    def _require_trainer(self) -> Trainer:
        """Returns the ``fleetpipe.Model`` that trains; raises StateError before :meth:`build`."""
        if self._trainer is None:
            raise StateError(
                "the pipeline is made of a first batch",
                fix="call model.build(train_dataset=dataset) first",
            )
        return self._trainer


class PeekedData:
    """Data whose first batch is read ahead and then yielded again as the first.

    Attributes:
        dataset: The data.
        first: The first batch of the data.
    """

    def __init__(self, dataset: Iterable[Nest]) -> None:
        """Reads the first batch of ``dataset``, which yields pairs (inputs, labels) anew each time.

        Raises:
            UsageError: The data can be read once only, is empty, or its items are no pairs.
        """
        if not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator):
            raise UsageError(
                "the data of train is read anew in each epoch",
                got=type(dataset).__name__,
                fix="pass a paddle.io.DataLoader, or a list of batches",
            )
        self.dataset = dataset
        self._first_pass: Iterator[Nest] | None = iter(dataset)
        self.first: Nest = next(self._first_pass, None)
        if not isinstance(self.first, (list, tuple)) or len(self.first) != 2:
            raise UsageError(
                "each item of the data is (inputs, labels)",
                got="no item" if self.first is None else type(self.first).__name__,
                fix="have the dataset return a pair",
            )

    def __iter__(self) -> Iterator[Nest]:
        """Yields the batches of a pass; the first pass begins with the batch that was read."""
        first_pass, self._first_pass = self._first_pass, None
        if first_pass is None:
            return iter(self.dataset)
        return itertools.chain([self.first], first_pass)


def _require_declared(captured: CapturedPipeline, network: Layer) -> None:
    """Raises ConfigError if a stage uses a parameter that was not declared for the stage."""
    for name, _, declared in nn.stages_of_parameters(network):
        used = captured.users[name]
        missing = sorted(set(used) - declared)
        if declared and missing:
            raise ConfigError(
                f"{name} is used in stage {missing[0]}, which it was not declared for",
                expected=f"stages {sorted(declared)}",
                got=f"stages {sorted(used)}",
                fix=f"add_pipeline_stage(net.{name}, {missing[0]})",
            )


def save(captured: CapturedPipeline, schedule: Schedule, job: Job, folder: str) -> None:
    """Writes the stages and the plan of this rank into ``folder/rank_<rank of the job>``.

    For each stage of this rank ``stage_<s>.txt`` has its nodes in order, with file, line and
    parameters. ``plan.txt`` has the plan of all ranks, and ``schedule.json`` is the simulated
    schedule for chrome://tracing.

    Args:
        captured: The model.
        schedule: The schedule that runs.
        job: The job.
        folder: The folder; it is created if it does not exist.
    """
    rank_folder = Path(folder) / f"rank_{job.hcg.get_global_rank()}"
    rank_folder.mkdir(parents=True, exist_ok=True)
    placement, staged = schedule.placement, captured.captures.of_example(training=True)
    stages = range(placement.stages) if job.local else placement.stages_of(job.hcg.get_stage_id())
    for stage in stages:
        text = "\n".join(_node_lines(staged, stage))
        (rank_folder / f"stage_{stage}.txt").write_text(f"{text}\n", encoding="utf-8")
    edges = captured.owned_stages.edges(training=True)
    (rank_folder / "plan.txt").write_text(f"{schedule.lower(edges)}\n", encoding="utf-8")
    events = events_of(schedule.simulate(edges=edges))
    write_trace(rank_folder / "schedule.json", {schedule.name: events}, placement, edges=edges)


def _node_lines(staged: StagedCapture, stage: int) -> Iterator[str]:
    """Yields a line for each node of a stage, followed by lines for the node's parameters."""
    for node in staged.nodes(stage):
        yield f"{node.name}  {node.location}"
        if node.is_layer:
            layer: Layer = node.function
            path = node.scopes[-1].path
            named = [(f"{path}.{name}", tensor) for name, tensor in layer.named_parameters()]
        else:
            named = [(owned.path, owned.tensor) for owned in node.state_refs]
        yield from (f"  {name} {list(parameter.shape)}" for name, parameter in named)
