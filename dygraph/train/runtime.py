"""What stands ready between batches: a model's schedule, its stage and its engines in a job."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from fleetpipe.aliases import Strategy
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.dygraph.backward.layer_state import buffers_kept
from fleetpipe.dygraph.batch.dygraph_stage import Batch, DygraphStage
from fleetpipe.dygraph.batch.rank_data import RankData
from fleetpipe.dygraph.batch.units import WHOLE, Units, units_of
from fleetpipe.dygraph.batch.weights import MicroBatchWeights
from fleetpipe.dygraph.layers.refusals import require_dynamic_graph
from fleetpipe.dygraph.model.additions import refuse_apart
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.dygraph.sums.refusals import refuse_beside_trees
from fleetpipe.dygraph.train.engines import Engines
from fleetpipe.dygraph.train.keys import BatchKeys
from fleetpipe.dygraph.train.order import as_hint, walker_of
from fleetpipe.dygraph.train.reductions import Reductions, share_state
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import StateError
from fleetpipe.job import agreement
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.groups import Group
from fleetpipe.schedules import Plan, Schedule

#: Runs the actions of a batch; takes the collectives of its plan by their names.
Run = Callable[[Mapping[str, Callable[[], None]]], None]


class Runtime:
    """What the batches of one model run on, as one process sees it.

    Attributes:
        layers: The model.
        job: The job in which it was wrapped.
        config: The options of its pipeline.
        switches: The options of ``pp_configs``.
        sequence: The ranks that have parts of the same sequences.
        bubbles: How many bubbles of a rank the user can hook.
        schedule: The schedule that a training batch runs.
        plan: The schedule, lowered.
        units: How the schedule cuts micro-batches.
        weights: How much micro-batches count in the loss.
        data: What ranks are passed of a batch.
        keys: Draws the seeds of batches.
        stage: Runs the actions of this process's stages.
        engines: Run the plan, with observers around its operations.
        reductions: Adds up gradients and losses of which ranks have parts.
    """

    layers: PipelineLayer
    job: Job
    reductions: Reductions
    engines: Engines
    config: PipelineConfig
    schedule: Schedule
    plan: Plan
    units: Units
    weights: MicroBatchWeights
    data: RankData
    stage: DygraphStage
    _version: int

    def __init__(
        self, layers: PipelineLayer, strategy: Strategy, job: Job, has_bubble_hooks: bool
    ) -> None:
        """Builds, verifies and lowers the schedule, and connects the ranks. Collective.

        Raises:
            ConfigError: An option is wrong.
            ScheduleError: The schedule passes the memory cap.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        self.layers = layers
        self.job = job
        self.switches = Switches.from_strategy(strategy, layers)
        self._running = False
        layers.follow()
        layers.require_listed()
        self.sequence: Group = job.sequence()
        self.bubbles = 2 * job.degrees.pp - 2 if has_bubble_hooks else 0
        scale, timed = scale_strategy(strategy), self.switches.enable_timer
        self.reductions = Reductions(layers, job, scale, timed)
        kinds = self.reductions.kinds
        self._exchanges = any(kind.exchanges for kind in kinds) or job.degrees.sep > 1
        self._arrange(PipelineConfig.from_strategy(strategy))
        self.keys: BatchKeys = BatchKeys(layers, job, self.config.rng)
        self.engines = Engines(job)
        for other in () if job.local else job.pipelines:
            if (earlier := other()) is not None:
                refuse_apart(layers.built_layers(), earlier.built_layers())
        job.pipelines.append(weakref.ref(layers))
        with job.guarded(lambda: "wrapping the model"):
            self._connect()
            job.require_agreement(self._facts())
            share_state(layers, job)

    @property
    def first_micro_batch(self) -> int:
        """The global number of this process's micro-batch 0: no copy draws another's numbers."""
        return self.job.copy * self.config.micro_batches

    def resize(self, micro_batches: int, micro_batch_size: int) -> None:
        """Takes another number and size of micro-batches from the next batch on.

        Raises:
            ConfigError: They do not fit the schedule.
            StateError: Hooks or a trace count actions.
        """
        config = self.config.resized(micro_batches, micro_batch_size)
        if micro_batches == self.config.micro_batches:
            self.config, self.data = config, RankData(self.job, self.schedule.placement, config)
            return
        if self.engines.hook_calls.hooks or self.engines.observer("trace"):
            raise StateError(
                "accumulate_steps cannot change while numbered hooks or a trace count actions",
                fix="set it before the first hook is registered, and without a trace",
            )
        self._arrange(config)
        self._connect()

    def require_running(self) -> Job:
        """Returns the job; refuses a batch after it has ended: its connections are closed.

        Raises:
            StateError: The job in which the model was wrapped is not the one that runs, or static
                graph is on.
        """
        require_dynamic_graph("a batch of a PipelineLayer")
        now = current_job()
        if now is not self.job:
            raise StateError(
                "this model's job has ended",
                expected="a batch between fleet.distributed_model and fleet.shutdown",
                got="no job that runs" if now is None else "another job, which began since",
                fix="call fleet.shutdown() after the last batch; in another job, build and wrap "
                "the model anew, and load what was saved",
            )
        with self._turn():
            return now

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """While it is open, no other thread may run a batch, nor anybody one of this model."""
        if self._running or not self.job.turn.acquire(blocking=False):
            raise StateError(
                "a batch runs already",
                expected="one batch at a time in a process",
                got=f"another in thread {threading.current_thread().name!r}",
                cause="two threads train or evaluate, or a hook of the running batch evaluates",
                fix="call train_batch and eval_batch one after another, as every rank does",
            )
        self._running = True
        try:
            yield
        finally:
            self._running = False
            self.job.turn.release()

    def pass_over_forwards(self) -> Keys | None:
        """Does what a run forward does before it begins; returns the seeds of the batch."""
        keys = self.keys.draw(training=False)
        self.layers.begin(training=False)
        return keys

    @contextmanager
    def running(
        self, batch: Batch, evaluated: int | None = None, units: Units = WHOLE
    ) -> Iterator[Run]:
        """While it is open, a batch can run; a failed one leaves gradients and buffers as before.

        A failure elsewhere ends this rank's waits within it, and one here reaches all others.

        Args:
            batch: The batch.
            evaluated: The number of its micro-batches if it runs forward only; None trains.
            units: The units of micro-batches in a run forward only, where each is one.

        Yields:
            What runs it, once.
        """
        training, engines = evaluated is None, self.engines
        engine = engines.training if evaluated is None else engines.evaluation.engine(evaluated)
        with self._turn():
            units = self.units if training else units
            first = self.first_micro_batch * units.count
            if training and self._version != self.layers.version:
                self.layers.require_listed()
                self.stage.split.forget_layers()
                self.stage.watch = self.layers.hidden_uses()
                self._version = self.layers.version
            watch = self.stage.watch
            hooks = engines.hook_calls.of_batch(training)
            trees = self.reductions.begin_trees(self.config.micro_batches) if training else None
            self.stage.begin(batch, first, hooks, units, trees)
            self.reductions.losses = batch.losses if self.data.owns_last else None
            # Elsewhere the job ends with the batch.
            kept = training and self.job.local
            put_back = buffers_kept([self.layers, *self.layers.loss_layers()] if kept else ())
            try:
                with (
                    self.job.guarded(engine.where),
                    self.job.limited_by_card(),
                    self.reductions.own_errors(),
                    nullcontext() if watch is None else watch.refused(),
                ):
                    yield functools.partial(engine.run, first_micro_batch=first)
                    if training:
                        self.job.progress.held = max(engine.peak_held.values())
            except BaseException:
                if training:
                    self.reductions.drop_gradients()
                    put_back()
                raise
            finally:
                self.stage.end()
                self.reductions.end_trees()
                if watch is not None:
                    watch.leave(ends=training)

    def _facts(self) -> dict[str, str]:
        """Returns what must be the same on all ranks."""
        facts = agreement.facts(self.config, self.switches)
        facts["gradient scale"] = self.reductions.scale
        facts.update({f"layer {i}": text for i, text in enumerate(self.layers.state.outlines())})
        facts["cut"] = str(self.layers.segment_parts)
        return facts

    def _arrange(self, config: PipelineConfig) -> None:
        """Builds the schedule, verified and lowered, and what runs its actions."""
        layers, delayed = self.layers, self.switches.delay_scale_loss
        schedule = layers.arrangement.schedule(config)
        schedule = as_hint(schedule, config, self.job, layers, self._exchanges)
        scale = self.reductions.scale
        weights = MicroBatchWeights(config, self.job, delayed, scale, layers.loss_functions)
        units = units_of(self, schedule, config)
        if self.job.sums_by_tree:
            parameters = layers.trained_parameters()
            sliced, placement = units.count > 1, schedule.placement
            refuse_beside_trees(parameters, delayed, sliced, placement, config.rng)
        plan = schedule.lower(layers.owned_stages.edges(training=True))
        plan.verify()
        # Nothing is refused from here on: after an error all is as it was.
        self.config, self.schedule, self.plan = config, schedule, plan
        self.weights, self.units = weights, units
        self.data = RankData(self.job, schedule.placement, config)
        self.stage = DygraphStage.of(layers.owned_stages, schedule, config.fast_leaves)
        #: The version of the layers that the stage knows; none yet.
        self._version = -1

    def _connect(self) -> None:
        """Makes the engines. Collective over the pipeline the first time in a job."""
        placement, costs, job = self.schedule.placement, self.config.costs, self.job
        evaluated = placement, self.layers.owned_stages.edges(training=False)
        overlaps = self.config.overlap and self._exchanges and not job.local
        walker = walker_of(self.schedule, self.config, job, self.layers)
        self.engines.begin(self, self.plan, self.stage, evaluated, overlaps, walker)
        job.describe_steps(
            (s for s in range(placement.stages) if self.data.plays(placement.rank_of(s))),
            self.config.micro_batches * self.config.micro_batch_size,
            None if costs is not None and costs.bytes is not None else self.config.memory_cap,
        )
