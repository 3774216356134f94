"""The wrapper that trains and evaluates a ``PipelineLayer``: Fleet's ``train_batch`` and kin."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable

from fleetpipe import __version__, numerics
from fleetpipe._paddle import paddle, user_strategy
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph import data_parallel, profiling
from fleetpipe.dygraph.deferral import DeferralReport
from fleetpipe.dygraph.micro_batches import MicroBatches, split
from fleetpipe.dygraph.optimizer import PipelineOptimizer
from fleetpipe.dygraph.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.split_backward import SplitBackward
from fleetpipe.dygraph.stage import Batch, DygraphStage
from fleetpipe.engine import Engine
from fleetpipe.errors import ConfigError
from fleetpipe.job import current_job
from fleetpipe.schedules import Plan, forward_only
from fleetpipe.trace import Trace
from fleetpipe.transport import Group


class PipelineParallel(paddle.nn.Layer):
    """Runs the batches of a ``PipelineLayer`` through the stages of all ranks.

    Every method below that takes a batch is collective: each rank of the pipeline calls it the same
    number of times, in the same order.
    """

    def __init__(self, layers: PipelineLayer, hcg: Any = None, strategy: Any = None) -> None:
        """Builds, verifies and lowers the schedule, and connects the ranks. Collective.

        Args:
            layers: The model.
            hcg: Accepted for Fleet's sake; the topology is that of ``fleet.init``.
            strategy: The options; None for those given to ``fleet.init``.

        Raises:
            ConfigError: ``fleet.init`` was not called, or an option is wrong.
            ScheduleError: The schedule passes the memory cap.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        super().__init__()
        job = current_job()
        if job is None:
            raise ConfigError(
                "a pipeline is wrapped after fleet.init(is_collective=True, strategy=strategy)"
            )
        self._layers = layers
        self._job = job
        strategy = strategy or user_strategy()
        self._config = PipelineConfig.from_strategy(strategy)
        self.schedule = layers.schedule(self._config)
        plan = self.schedule.lower()
        plan.verify()
        self._scale = data_parallel.scale_strategy(strategy)
        self._split = SplitBackward(self.schedule, layers.stage_layers)
        self._stage = DygraphStage(layers.run_stage, plan.edges, self._split)
        with job.guarded(lambda: "wrapping the model"):
            self._trace = self._begin_trace()
            self._training = self._engine(plan, self._trace)
            job.require_agreement(self._facts())
            data_parallel.broadcast_state(layers.state_dict(), job.replicas())
        self._evaluation: Engine | None = None

    @property
    def accumulate_steps(self) -> int:
        """The number m of micro-batches of a batch."""
        return self._config.micro_batches

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch."""
        return self._config.micro_batch_size

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._job.degrees.pp

    @property
    def stage_id(self) -> int:
        """This process's rank in the pipeline; 0 where it plays all ranks."""
        return int(self._job.hcg.get_stage_id())

    def is_pipeline_first_stage(self) -> bool:
        """Whether this process owns the first stage, which takes the inputs."""
        return self._owns(0)

    def is_pipeline_last_stage(self) -> bool:
        """Whether this process owns the last stage, which takes the labels."""
        return self._owns(self.schedule.placement.stages - 1)

    @property
    def trace(self) -> Trace | None:
        """What really ran, where ``fleetpipe_configs["trace"]`` asked for it."""
        return self._trace

    @property
    def peak_held(self) -> dict[int, int]:
        """Most forwards held unreleased in the last training run, by rank played here."""
        return self._training.peak_held

    def profile(self, data: Any, path: str | Path | None = None) -> dict[str, Any]:
        """Measures what the actions of each stage cost. Collective.

        Parameters stay as they are; gradients are cleared.

        Args:
            data: As for :meth:`train_batch`.
            path: Where rank 0 writes the costs as JSON, for ``fleetpipe schedule auto --costs`` and
                ``fleetpipe_configs["costs"]``.

        Returns:
            Seconds of F, I and W of each stage, the latency of an edge, and the bytes that a
            forward of each stage holds: the form of ``fleetpipe.schedules.Costs.from_json``.
        """
        batches = split(data, self.accumulate_steps, self.micro_batch_size)
        with self._job.guarded(lambda: "profiling"):
            measured = profiling.measure(self.layers, self._job, batches, self.weights)
        if path is not None and self.stage_id == 0 and self.replicas.rank == 0:
            Path(path).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        return measured

    def deferral_report(self) -> DeferralReport:
        """Returns which parameters' gradients wait for W, and the bytes kept between I and W.

        For the stages of this process, of a schedule that splits backward, after a first batch.
        """
        return self._split.report()

    def train_batch(
        self, data: Any, optimizer: Any, lr_scheduler: Any = None, scaler: Any = None
    ) -> Any:
        """Trains on one batch: all micro-batches forward and backward, then one optimizer step.

        Args:
            data: ``[inputs, labels]`` of accumulate_steps x micro_batch_size rows, or an iterator
                of which accumulate_steps items ``(inputs, labels)`` are taken. Every rank may pass
                the same; only the owners of the first and the last stage need theirs.
            optimizer: What ``fleet.distributed_optimizer`` returned.
            lr_scheduler: Stepped once, after the optimizer.
            scaler: A ``paddle.amp.GradScaler``; in this version only a disabled one, as on CPU.

        Returns:
            The loss of the batch, a Tensor without gradient, with the shape, the dtype and the same
            bits on every rank: the mean over micro-batches, or the sum if so configured.

        Raises:
            ConfigError: The batch, the optimizer or the grad mode does not fit.
            BoundaryError: A value cannot cross between stages.
            PeerFailed: Another rank left.
            PipelineTimeout: A message did not come within the limit.
        """
        if not isinstance(optimizer, PipelineOptimizer):
            raise ConfigError(
                "train_batch needs an optimizer wrapped for the pipeline",
                got=type(optimizer).__name__,
                fix="optimizer = fleet.distributed_optimizer(optimizer)",
            )

        def step() -> None:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.clear_grad()

        loss = self._train(data, scaler, step)
        if lr_scheduler is not None:
            lr_scheduler.step()
        return loss

    def forward_backward_pipeline(self, data: Any, scaler: Any = None) -> Any:
        """Trains without the optimizer step: leaves the gradients on the parameters.

        Args:
            data: As for :meth:`train_batch`.
            scaler: As for :meth:`train_batch`.

        Returns:
            The loss, as :meth:`train_batch` does.
        """
        return self._train(data, scaler, lambda: None)

    def eval_batch(self, data: Any, compute_loss: bool = False) -> Any:
        """Runs one batch forward without gradients; leaves the layers in ``eval()`` mode.

        Args:
            data: As for :meth:`train_batch`.
            compute_loss: Whether to compute the loss instead of returning outputs.

        Returns:
            With ``compute_loss`` the loss, on every rank the same. Else a list with the output of
            each micro-batch on the rank that owns the last stage, and an empty list elsewhere.
        """
        self._layers.eval()
        if self._evaluation is None:
            placement = self.schedule.placement
            self._evaluation = self._engine(forward_only(placement, self.accumulate_steps).lower())
        criterion = self._layers.loss_fn() if compute_loss else None
        batch = self._begin(data, criterion, None)
        with self._job.guarded(self._evaluation.where), paddle.no_grad():
            self._evaluation.run({}, self._first_micro_batch)
            if compute_loss:
                return self._share_loss(batch)
        return [batch.outputs[index] for index in sorted(batch.outputs)]

    def _train(self, data: Any, scaler: Any, step: Callable[[], None]) -> Any:
        if not paddle.is_grad_enabled():
            raise ConfigError(
                "training needs gradients, and they are switched off",
                fix="leave paddle.no_grad(), or use eval_batch",
            )
        if scaler is not None and scaler.is_enable() and not self._job.local:
            raise ConfigError(
                "this version does not run an enabled GradScaler over several processes",
                cause="all ranks would have to agree on whether a gradient overflowed",
                fix="pass scaler=None, or GradScaler(enable=False)",
            )
        self._layers.train()
        scale = None if scaler is None else scaler.scale
        batch = self._begin(data, self._layers.loss_fn(), scale)
        losses: list[Any] = []

        def reduce() -> None:
            # The loss goes out before the step, so that nobody waits for the last stage's update.
            losses.append(self._share_loss(batch))
            data_parallel.reduce_gradients(
                self._layers.parameters(), self._job.replicas(), self._scale
            )

        with self._job.guarded(self._training.where):
            if self._trace is not None:
                self._trace.begin_step(self._first_micro_batch)
            self._training.run({"REDUCE": reduce, "STEP": step}, self._first_micro_batch)
            if self._trace is not None:
                self._trace.end_step()
        return losses[0]

    @property
    def layers(self) -> PipelineLayer:
        """The wrapped model."""
        layers: PipelineLayer = self._layers
        return layers

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same stages in all replicas."""
        return self._job.replicas()

    @property
    def weights(self) -> list[Fraction]:
        """The weight of each of this replica's micro-batches in its loss of the batch."""
        count = self.accumulate_steps
        return [Fraction(1, count if self._config.loss_reduction == "mean" else 1)] * count

    @property
    def weights_of_all_replicas(self) -> list[Fraction]:
        """The weight of each micro-batch of all replicas in the gradients of the step."""
        replicas = self._job.replicas().ranks
        share = Fraction(1, replicas if self._scale == "avg" else 1)
        return [weight * share for weight in self.weights] * replicas

    def shared_micro_batches(self, data: Any) -> tuple[MicroBatches, MicroBatches]:
        """Gives every rank the inputs of the first stage and the labels of the last. Collective.

        Args:
            data: As for :meth:`train_batch`.

        Returns:
            The micro-batches of this replica, which are ``data`` for any of these methods, and
            those of all replicas, one replica after another.
        """
        batches = split(data, self.accumulate_steps, self.micro_batch_size)
        placement = self.schedule.placement
        group = self._job.group()
        inputs = group.broadcast(batches.inputs, placement.rank_of(0))
        labels = group.broadcast(batches.labels, placement.rank_of(placement.stages - 1))
        replicas = self._job.replicas().all_gather((inputs, labels))
        everyone = MicroBatches(
            [one for theirs, _ in replicas for one in theirs],
            [one for _, theirs in replicas for one in theirs],
        )
        return MicroBatches(inputs, labels), everyone

    def _begin(self, data: Any, criterion: Any, scale: Any) -> Batch:
        micro_batches = split(data, self.accumulate_steps, self.micro_batch_size)
        if micro_batches.inputs is None and self.is_pipeline_first_stage():
            raise ConfigError("this rank owns the first stage and was given no inputs")
        if micro_batches.labels is None and criterion and self.is_pipeline_last_stage():
            raise ConfigError("this rank owns the last stage and was given no labels")
        batch = Batch(micro_batches, self.weights, criterion, scale)
        self._stage.begin(batch, self._first_micro_batch)
        return batch

    @property
    def _first_micro_batch(self) -> int:
        """The global number of this replica's micro-batch 0."""
        return self._job.replicas().rank * self.accumulate_steps

    def _share_loss(self, batch: Batch) -> Any:
        """Gives the mean loss of the replicas' last stages to every rank. Collective."""
        owner = self.schedule.placement.rank_of(self.schedule.placement.stages - 1)
        loss = None
        if self.is_pipeline_last_stage():
            loss = data_parallel.mean_loss(batch.total_loss(), self._job.replicas())
        return self._job.group().broadcast(loss, owner)

    def _facts(self) -> dict[str, str]:
        """Returns what must be the same on all ranks."""
        facts = {**numerics.settings(), "fleetpipe": __version__, "schedule": self.schedule.name}
        facts.update({name: repr(value) for name, value in asdict(self._config).items()})
        # Which folder it is matters to rank 0 alone.
        facts["trace"] = str(self._config.trace is not None)
        facts["gradient scale"] = self._scale
        layers = self.layers
        facts.update({f"layer {i}": text for i, text in enumerate(layers.outlines())})
        facts["cut"] = str(layers.segment_parts)
        return facts

    def _engine(self, plan: Plan, trace: Trace | None = None) -> Engine:
        transports = self._job.connect()
        if trace is None:
            return Engine(plan, self._stage, transports, self._job.timeout)
        recorded = trace.transports(transports)
        return Engine(plan, trace.stage(self._stage), recorded, self._job.timeout)

    def _begin_trace(self) -> Trace | None:
        """Begins to record if that was asked for; the first replica records for all."""
        folder = self._config.trace
        if folder is None or self._job.replicas().rank > 0:
            return None
        trace = Trace(Path(folder), self.schedule, self._job.connect(), self._job.group())

        def write() -> None:
            told = trace.write()
            if told is not None:
                sys.stderr.write(f"fleetpipe: {told}\n")

        self._job.endings.append(write)
        return trace

    def _owns(self, stage: int) -> bool:
        return self._job.local or self.schedule.placement.rank_of(stage) == self.stage_id
