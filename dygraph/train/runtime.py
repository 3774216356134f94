"""What a wrapper runs: builds its schedule, its stage and its engines, and connects the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Callable

from fleetpipe import __version__, numerics
from fleetpipe._paddle import user_strategy
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.backward.crossings import Crossing
from fleetpipe.dygraph.backward.deferral_report import DeferralReport
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.outputs import Evaluation
from fleetpipe.dygraph.batch.stage import DygraphStage
from fleetpipe.dygraph.broadcast import broadcast_state
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe import finite, hooks
from fleetpipe.dygraph.observe.timers import TimedActions, Timers
from fleetpipe.dygraph.optimizer import replicas
from fleetpipe.dygraph.train.fleet_face import PipelineAttributes
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Observer
from fleetpipe.engine.trace import Trace
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job.job import current_job
from fleetpipe.schedules import Plan


class PipelineEngines(PipelineAttributes):
    """The part of a wrapper that stands ready between batches."""

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
        job = current_job()
        if job is None:
            raise ConfigError(
                "a pipeline is wrapped after fleet.init",
                got="no fleet.init, or a fleet.shutdown() since",
                fix="call fleet.init(is_collective=True, strategy=strategy) first",
            )
        if not isinstance(layers, PipelineLayer):
            raise ConfigError("a pipeline wraps a PipelineLayer", got=type(layers).__name__)
        strategy = strategy or user_strategy()
        begin: Callable[..., None] = super().__init__
        begin(layers, hcg or job.hcg, strategy)
        self._job = job
        self._own_errors: Callable[[], AbstractContextManager[None]] = (
            tensor_parallel.own_errors if job.degrees.mp > 1 else nullcontext
        )
        self._switches = Switches.from_strategy(strategy, layers)
        self._scale = replicas.scale_strategy(strategy)
        self.timers = Timers() if self._switches.enable_timer else None
        self._check_finite = finite.asked_for()
        self._observers: list[Observer] = []
        self._arrange(PipelineConfig.from_strategy(strategy))
        job.pipelines.append(weakref.ref(layers))
        with job.guarded(lambda: "wrapping the model"):
            self._trace = Trace.of_job(self._config.trace, self.schedule, job)
            self._connect()
            job.require_agreement(self._facts())
            losses = [layer.state_dict() for layer in layers.loss_layers()]
            for state in (layers.state.own(), *losses):
                tensor_parallel.share_whole_state(state, job.model_parallel())
                broadcast_state(state, job.replicas())

    @property
    def trace(self) -> Trace | None:
        """What really ran, where ``fleetpipe_configs["trace"]`` asked for it."""
        return self._trace

    @property
    def peak_held(self) -> dict[int, int]:
        """Most forwards held unreleased in the last training run, by rank played here."""
        return self._training.peak_held

    def observe(self, observer: Observer) -> None:
        """Has ``observer`` watch every operation of later batches."""
        self._observers.append(observer)
        self._connect()

    def deferral_report(self) -> DeferralReport:
        """Returns which parameters' gradients wait for W, and the bytes kept between I and W.

        For the stages of this process, of a schedule that splits backward, after a first batch.
        """
        return self._split.report()

    @contextmanager
    def crossings(self) -> Iterator[dict[int, Crossing]]:
        """Within it training notes how the graphs of this process's stages hang together.

        Yields:
            By stage, its crossing in the last micro-batch.
        """
        found: dict[int, Crossing] = {}
        self._stage.crossings = found
        try:
            yield found
        finally:
            self._stage.crossings = None

    def reordered_leaves(self) -> list[str]:
        """Returns the layers here whose split backward may add up in another order than a full one.

        Known after a first batch, as :meth:`deferral_report` is.
        """
        return self._split.reordered()

    def _timing(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.timers is None else self.timers.timing(name)

    @property
    def _last_owner(self) -> int:
        placement = self.schedule.placement
        return placement.rank_of(placement.stages - 1)

    @property
    def _first_micro_batch(self) -> int:
        """The global number of this replica's micro-batch 0."""
        return self._job.replicas().rank * self.accumulate_steps

    def _facts(self) -> dict[str, str]:
        """Returns what must be the same on all ranks."""
        facts = {**numerics.settings(), "fleetpipe": __version__, "schedule": self.schedule.name}
        for options in (asdict(self._config), asdict(self._switches)):
            facts.update({name: repr(value) for name, value in options.items()})
        # Which folder it is matters to rank 0 alone.
        facts["trace"] = str(self._config.trace is not None)
        facts["gradient scale"] = self._scale
        layers = self.layers
        facts.update({f"layer {i}": text for i, text in enumerate(layers.state.outlines())})
        facts["cut"] = str(layers.segment_parts)
        return facts

    def _require_running(self) -> None:
        """Refuses a batch after the job has ended; its connections are closed.

        Raises:
            StateError: The job in which the model was wrapped is not the one that runs.
        """
        now = current_job()
        if now is not self._job:
            raise StateError(
                "this model's job has ended",
                expected="a batch between fleet.distributed_model and fleet.shutdown",
                got="no job that runs" if now is None else "another job, which began since",
                cause="fleet.shutdown() was called after the model was wrapped",
                fix="call fleet.shutdown() after the last batch; in another job, build and wrap "
                "the model anew, and load what was saved",
            )

    def _resize(self, micro_batches: int, micro_batch_size: int) -> None:
        """Takes another number and size of micro-batches from the next batch on."""
        config = self._config.resized(micro_batches, micro_batch_size)
        if micro_batches == self._config.micro_batches:
            self._config = config
            return
        if self._hooks or self._trace:
            raise ConfigError(
                "accumulate_steps cannot change while numbered hooks or a trace count actions",
                fix="set it before the first hook is registered, and without a trace",
            )
        self._arrange(config)
        self._connect()

    def _arrange(self, config: PipelineConfig) -> None:
        """Builds the schedule, verified and lowered, and what runs its actions."""
        schedule = self.layers.schedule(config)
        plan = schedule.lower()
        plan.verify()
        # Nothing is refused from here on: after an error all is as it was.
        self._config, self.schedule, self._plan = config, schedule, plan
        bubbles = 2 * self.num_stages - 2 if self._has_bubble_hooks else 0
        self._hooks = hooks.UserHooks(self.schedule, bubbles)
        self._hook_calls = hooks.HookCalls(self._hooks, self.schedule)
        self._split = SplitBackward(self.schedule, self.layers.stage_layers)
        self._stage = DygraphStage(self.layers.runner.function, self._plan.edges, self._split)

    def _connect(self) -> None:
        """Makes the engines. Collective over the pipeline the first time in a job."""
        self._training = self._engine(self._plan, self._trace)
        self._evaluation = Evaluation(self.schedule.placement, self._engine)

    def _engine(self, plan: Plan, trace: Trace | None = None) -> Engine:
        observers = [*self._observers]
        if self._check_finite:
            observers.append(finite.FiniteSends())
        if self.timers is not None:
            observers.append(TimedActions(self.timers))
        if trace is not None:
            observers.append(trace)
        return Engine(plan, self._stage, self._job.connect(), self._job.timeout, observers)
