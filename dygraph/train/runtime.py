"""What stands ready between batches: a model's schedule, its stage and its engines in a job."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Strategy
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.dygraph import random_keys, tensor_parallel
from fleetpipe.dygraph.backward.own_state import OwnState
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Criterion, Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatchCut, MicroBatches, split
from fleetpipe.dygraph.batch.observed import ObservedBatch
from fleetpipe.dygraph.batch.outputs import Evaluation
from fleetpipe.dygraph.batch.row_digests import RowComparison
from fleetpipe.dygraph.batch.stage import Batch, DygraphStage
from fleetpipe.dygraph.batch.units import WHOLE, Units, units_of
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.model.hidden_uses import HiddenUses
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.hooks import HookCalls
from fleetpipe.dygraph.observe.timers import Timers
from fleetpipe.dygraph.train.observers import observers_of
from fleetpipe.dygraph.train.reductions import Reductions, share_state
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Observer, Observers
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job import agreement
from fleetpipe.job.job import Job, current_job
from fleetpipe.schedules import Plan, Schedule


class Runtime:
    """What the batches of one model run on, as one process sees it.

    Attributes:
        layers: The model.
        job: The job in which it was wrapped.
        config: The options of its pipeline.
        switches: Those of ``pp_configs``.
        scale: Whether the gradients of the replicas are averaged ("avg") or added up ("sum").
        sequence: The ranks that have parts of the same sequences.
        timers: Those of ``pp_configs.enable_timer``; None where it is off.
        schedule: What is run.
        plan: The schedule, lowered.
        units: How the schedule cuts micro-batches.
        bubbles: How many bubbles of a rank the user can hook.
        first_owner: The rank that owns the first stage.
        last_owner: The rank that owns the last stage.
        split: Keeps what weight gradients need, where the schedule splits backward.
        stage: Runs the actions of this process's stages.
        observers: What watches the training batches.
        hook_calls: That of them which calls the user's hooks.
        engine: Walks the plan of a training batch.
        evaluation: The engines that run forwards only.
        losses: Those of the last batch, where this process owns the last stage.
        reductions: Adds up what ranks have parts of.
    """

    config: PipelineConfig
    schedule: Schedule
    plan: Plan
    units: Units
    first_owner: int
    last_owner: int
    split: SplitBackward
    stage: DygraphStage
    observers: Observers
    hook_calls: HookCalls
    engine: Engine
    evaluation: Evaluation

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
        self.timers = Timers() if self.switches.enable_timer else None
        self.losses: Losses | None = None
        self._running = False
        layers.follow()
        layers.require_listed()
        self._version = -1
        self.hidden_uses: HiddenUses | None = None
        self.sequence = job.along("sep", "cp")
        self._comparison = RowComparison(job)
        #: Whether a reference runs beside each batch, which is to draw what the pipeline draws.
        self.compared = False
        self.bubbles = 2 * job.degrees.pp - 2 if has_bubble_hooks else 0
        self.reductions = Reductions(layers, job, scale_strategy(strategy), self.timers)
        self._own_errors = nullcontext if self.reductions.sole else tensor_parallel.own_errors
        self._rows: dict[str, Any] = {}
        self._arrange(PipelineConfig.from_strategy(strategy))
        job.pipelines.append(weakref.ref(layers))
        with job.guarded(lambda: "wrapping the model"):
            self._connect()
            job.require_agreement(self._facts())
            share_state(layers, job)

    @property
    def weights(self) -> list[Fraction]:
        """The weight of each of this replica's micro-batches in its loss of the batch."""
        count = self.config.micro_batches
        return [Fraction(1, 1 if self.config.loss_reduction == "sum" else count)] * count

    @property
    def first_micro_batch(self) -> int:
        """The global number of this process's micro-batch 0: no copy draws another's numbers."""
        return self.job.copy * self.config.micro_batches

    def plays(self, rank: int) -> bool:
        """Whether this process is that rank of the pipeline, or plays all ranks."""
        return self.job.local or rank == self.job.hcg.get_stage_id()

    def cut(self, any_rows: bool = False, keeps_graph: bool = False) -> MicroBatchCut:
        """Returns how a batch is cut, one with another number of rows too if ``any_rows``."""
        config = self.config
        return MicroBatchCut(config.micro_batches, config.micro_batch_size, any_rows, keeps_graph)

    def micro_batches(
        self, data: Nest, any_rows: bool = False, keeps_graph: bool = False
    ) -> MicroBatches:
        """Cuts a batch in any form that ``train_batch`` takes.

        Raises:
            ConfigError: The number of rows or items does not fit.
            BoundaryError: A value is not made of Tensors.
        """
        return split(data, self.cut(any_rows, keeps_graph))

    def observe(self, observer: Observer) -> None:
        """Makes ``observer`` watch later batches."""
        self._rows["users"].members.append(observer)
        self._compile()

    def accompany(self, companion: Observer | None) -> None:
        """Makes ``companion`` watch later batches, and no other companion."""
        self._rows["companion"].members[:] = [] if companion is None else [companion]

    def observer(self, name: str) -> Any:
        """Returns an observer by its row of ``observers.py``; None if nobody asked for it."""
        return self._rows.get(name)

    def resize(self, micro_batches: int, micro_batch_size: int) -> None:
        """Takes another number and size of micro-batches from the next batch on.

        Raises:
            ConfigError: They do not fit the schedule.
            StateError: Hooks or a trace count actions.
        """
        config = self.config.resized(micro_batches, micro_batch_size)
        if micro_batches == self.config.micro_batches:
            self.config = config
            return
        if self.hook_calls.hooks or self.observer("trace"):
            raise StateError(
                "accumulate_steps cannot change while numbered hooks or a trace count actions",
                fix="set it before the first hook is registered, and without a trace",
            )
        self._arrange(config)
        self._connect()

    def require_running(self) -> None:
        """Refuses a batch after the job has ended; its connections are closed.

        Raises:
            StateError: The job in which the model was wrapped is not the one that runs.
        """
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
            pass

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """While it is open, no other thread may run a batch, nor anybody one of this model.

        Raises:
            StateError: Some thread, or a batch of this model, runs.
        """
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

    def require_data(self, batches: MicroBatches, labelled: bool) -> None:
        """Refuses a batch that lacks what this process's stages need.

        Raises:
            ConfigError: It has no inputs for the first stage, or no labels for the last.
        """
        if batches.inputs is None and self.plays(self.first_owner):
            raise ConfigError(
                "this rank owns the first stage and was given no inputs",
                fix="give this rank the batch; None is for ranks without the first stage",
            )
        if labelled and batches.labels is None and self.plays(self.last_owner):
            raise ConfigError(
                "this rank owns the last stage and was given no labels",
                fix="give this rank the batch too, [inputs, labels]; where loss_fn needs no "
                "labels, [inputs, [None] * accumulate_steps]",
            )

    def drawn_keys(self) -> random_keys.Keys | None:
        """Returns the seeds of the next batch, whose number is drawn now."""
        return random_keys.draw(self.config.rng, self.keys_python(), self.sequence.rank)

    def keys_python(self) -> bool | None:
        """Returns whether Python's and NumPy's draws are keyed: see :class:`random_keys.Keys`."""
        alone = self.job.everyone().ranks == 1 and not self.compared
        return self.layers.draws_python or (False if alone else None)

    def compare_rows(self, batches: MicroBatches, count: int = 0) -> int:
        """Makes sure that this replica's ranks were given the rows of one batch. Collective.

        Args:
            batches: Those that this rank was given.
            count: What the owner of the first stage has to say beside it.

        Returns:
            ``count`` of that owner.

        Raises:
            ConfigError: They were given different rows.
        """
        return self._comparison.compare(
            batches if self.config.compare_rows else None,
            count,
            self.first_owner,
            (self.plays(self.first_owner), self.plays(self.last_owner)),
        )

    def loss_functions(self, index: int) -> list[Criterion]:
        """Returns all loss functions of the model, after a look at the chosen one.

        Raises:
            ConfigError: There is none, or none of that number.
        """
        functions = self.layers.loss_functions()
        if index not in range(len(functions)):
            raise ConfigError(
                f"there is no loss function {index}",
                expected=f"loss_fn_idx from 0 to {len(functions) - 1}",
                fix="pass loss_fn=[f, g, ..] when you build the PipelineLayer",
            )
        return functions

    @contextmanager
    def running(self, batch: Batch, engine: Engine, training: bool) -> Iterator[None]:
        """While it is open, ``engine`` may run ``batch``; a failed one leaves no gradients.

        A failure elsewhere ends this rank's waits within it, and one here reaches all others.
        """
        with self._turn():
            units = self.units if training else WHOLE
            first = self.first_micro_batch * units.count
            if training and self._version != self.layers.version:
                self._version = self.layers.version
                self.layers.require_listed()
                self.split.forget_layers()
                self.hidden_uses = self.layers.hidden_uses()
            hidden = self.hidden_uses
            self.stage.watch = None if hidden is None else hidden.enter
            self.stage.begin(batch, first, self.hook_calls.of_batch(training), units)
            self.losses = batch.losses if self.plays(self.last_owner) else None
            try:
                with (
                    self.job.guarded(engine.where),
                    self.job.limited_by_card(),
                    self._own_errors(),
                    nullcontext() if hidden is None else hidden.refused(),
                ):
                    yield
                    if training:
                        self.job.progress.held = max(engine.peak_held.values())
            except BaseException:
                # Some micro-batches are in the gradients, to which the next batch must not add.
                if training:
                    drop_gradients(self.layers.trained_parameters())
                raise
            finally:
                self.stage.end()
                if hidden is not None:
                    hidden.leave(ends=training)

    def prepare(self, batch: ObservedBatch) -> None:
        """Has layers, observers and the gradients that are left ready for a batch. Collective.

        Raises:
            ConfigError: The ranks of this replica were given different rows.
        """
        self.layers.begin(training=True)
        if self.config.compare_rows:
            with self.job.guarded(lambda: "comparing the rows that ranks were given"):
                self.compare_rows(batch.data)
        self.observers.begin(batch)
        self.reductions.set_aside_gradients()

    def reduce(self, loss: Nest) -> None:
        """Adds up the gradients of all ranks; the stages have run, with this loss. Collective."""
        if self.hidden_uses is not None:
            self.hidden_uses.leave()
        self.observers.computed()
        self.reductions.reduce_gradients()
        self.observers.reduced(loss)

    def _facts(self) -> dict[str, str]:
        """Returns what must be the same on all ranks."""
        facts = agreement.facts(self.config, self.switches)
        facts["gradient scale"] = self.reductions.scale
        facts.update({f"layer {i}": text for i, text in enumerate(self.layers.state.outlines())})
        facts["cut"] = str(self.layers.segment_parts)
        return facts

    def _arrange(self, config: PipelineConfig) -> None:
        """Builds the schedule, verified and lowered, and what runs its actions."""
        schedule = self.layers.schedule(config)
        self._refuse_delayed_weights(config)
        units = units_of(self, schedule, config)
        plan = schedule.lower(self.layers.edges(training=True))
        plan.verify()
        # Nothing is refused from here on: after an error all is as it was.
        self.config, self.schedule, self.plan, self.units = config, schedule, plan, units
        placement = schedule.placement
        self.first_owner = placement.rank_of(0)
        self.last_owner = placement.rank_of(placement.stages - 1)
        self.split = SplitBackward(schedule, self.layers.stage_layers, config.fast_leaves)
        self.stage = DygraphStage(self.layers.function, placement, self.split, self.layers.borders)

    def _refuse_delayed_weights(self, config: PipelineConfig) -> None:
        """Refuses to weight all losses alike where they count by their places."""
        by_places = config.loss_reduction == "tokens" or self.sequence.ranks > 1
        if self.switches.delay_scale_loss and by_places:
            raise ConfigError(
                "delay_scale_loss weights all losses alike, and these count by their places",
                cause="sequences are split along sep or cp, or loss_reduction is 'tokens'",
                fix="leave delay_scale_loss out",
            )

    def _connect(self) -> None:
        """Makes the engines. Collective over the pipeline the first time in a job."""
        self._rows = observers_of(self, self._rows)
        self.hook_calls = self._rows["hooks"]
        placement, costs = self.schedule.placement, self.config.costs
        self.job.describe_steps(
            (s for s in range(placement.stages) if self.plays(placement.rank_of(s))),
            self.config.micro_batches * self.config.micro_batch_size,
            None if costs is not None and costs.bytes is not None else self.config.memory_cap,
        )
        self._compile()

    def _compile(self) -> None:
        """Makes the engines anew, with all observers around their operations."""
        self.observers = Observers(*self._rows.values())
        evaluating = [*self.observers.in_evaluations()]
        edges = self.layers.edges(training=False)
        self.engine = self._engine(self.plan, [self.observers], self._overlapping())
        self.evaluation = Evaluation(
            self.schedule.placement, edges, lambda plan: self._engine(plan, evaluating)
        )

    def _overlapping(self) -> OwnState | None:
        """Returns what lets a fused forward and backward take turns, if they exchange anything."""
        exchange = any(k.exchanges for k in self.reductions.kinds) or self.job.degrees.sep > 1
        return OwnState() if self.config.overlap and exchange and not self.job.local else None

    def _engine(
        self, plan: Plan, observers: Sequence[Observer], overlapping: OwnState | None = None
    ) -> Engine:
        connections, timeout = self.job.connect(), self.job.timeout
        return Engine(plan, self.stage, connections, timeout, observers, overlapping)
