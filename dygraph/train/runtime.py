"""What a wrapped model has between batches: its schedule, stage, engines and random seeds.

Start with :class:`Runtime`. The seeds of a batch are its ``keys``: random numbers depend on them,
and on the layer and the micro-batch. With ``fleetpipe_configs["order"] = "ready"`` a rank may
reorder the actions of the schedule: it runs the first of its actions that is ready.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fleetpipe import log
from fleetpipe.aliases import Strategy, Tensor
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward.layer_state import buffers_kept
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.row_digests import RankData
from fleetpipe.dygraph.batch.stage_interfaces import Batch
from fleetpipe.dygraph.batch.units import WHOLE, MicroBatchWeights, Units, units_of
from fleetpipe.dygraph.layers.run_stage import require_dynamic_graph
from fleetpipe.dygraph.model.hidden_uses import find_reachable, refuse_layers_on_different_ranks
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import FLEET, Keys
from fleetpipe.dygraph.sums import refuse_beside_trees
from fleetpipe.dygraph.train.observers import Engines
from fleetpipe.dygraph.train.reductions import Reductions, share_state
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.engine.engine import Walker
from fleetpipe.engine.ready import ReadyWalker
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Plan, Schedule
from fleetpipe.schedules.envelope import Envelope, without_fusion

_log = log.logger(__name__)

#: ``run(collectives)`` runs a batch; ``collectives`` has the functions to call for the collective
#: operations of the plan, by their names.
Run = Callable[[Mapping[str, Callable[[], None]]], None]


class BatchKeys:
    """Draws the seeds of each batch of a model."""

    def __init__(self, layers: PipelineLayer, job: Job, mode: str) -> None:
        """Stores the model and the options on which seeds depend; draws no seed yet.

        Args:
            layers: The model.
            job: The job.
            mode: The option ``rng``.
        """
        self._layers, self._job, self._mode = layers, job, mode
        self._sequence_rank = job.sequence().rank

    def draw(self, training: bool = True) -> Keys | None:
        """Draws the seeds of the batch that begins; None if the option ``rng`` is ``"fleet"``.

        Args:
            training: Whether the batch trains, instead of running forward only.
        """
        python = self._layers.owned_stages.draws_python
        keys = random_keys.draw_keys(self._mode, python, self._sequence_rank, training)
        if keys is not None:
            keys.parameters = self._parameters
        return keys

    def _parameters(self) -> dict[str, Tensor]:
        """Returns the parameters of this process and of the losses, by fully qualified name."""
        numbered = enumerate(self._layers.loss_parameters())
        of_losses = {f"loss.{number}": parameter for number, parameter in numbered}
        return {**of_losses, **self._layers.state.own_parameters()}

    def peek(self, training: bool = True) -> Keys | None:
        """Returns the seeds of the next batch, without a change of the random states.

        Collective over mp.

        Args:
            training: Whether that batch trains, instead of running forward only.
        """
        with random_keys.random_states_kept():
            keys = self.draw(training)
        if keys is not None:
            keys.agree(self._job.model_parallel())
        return keys

    def keyed(self, keys: Keys | None) -> AbstractContextManager[None]:
        """Returns a context in which layers draw by the seeds ``keys``. Collective over mp."""
        return random_keys.under_keys(keys, self._job.model_parallel())


def without_fusion_if_reordered(
    schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer, exchanges: bool
) -> Schedule:
    """Returns a schedule without fused actions, if ranks may reorder it; else unchanged.

    Args:
        schedule: The schedule of the options.
        config: The options.
        job: The job.
        layers: The model.
        exchanges: Whether layers of this process exchange values with other ranks in an action.

    Raises:
        ConfigError: An option, or a layer, does not allow to reorder actions.
    """
    if _may_reorder(config, job):
        _require_no_order(config, job, layers, exchanges)
        return without_fusion(schedule)
    if config.order == "ready" and job.degrees.pp > 1:
        _log.info("order='ready' changes nothing where one process plays all ranks, in one order")
    return schedule


def walker_of(
    schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer
) -> Callable[..., Walker]:
    """Returns the function that makes the walker, which runs the actions of this process's rank.

    The walker may reorder them if the options say so. The arguments are those of
    :func:`without_fusion_if_reordered`; the schedule is its result.
    """
    if _may_reorder(config, job):
        return functools.partial(ReadyWalker, _EnvelopeBuilder(schedule, config, job, layers))
    return Walker


def _may_reorder(config: PipelineConfig, job: Job) -> bool:
    """Whether ranks may reorder the actions of the schedule, by the option ``order``."""
    return config.order == "ready" and job.degrees.pp > 1 and not job.local


class _EnvelopeBuilder:
    """Returns for each batch an envelope: which actions this process's rank may run early.

    The envelope depends on the layers of the model; it is computed again when they have changed.
    """

    def __init__(
        self, schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer
    ) -> None:
        """Stores what the envelope depends on; the first call computes it.

        The arguments are those of :func:`walker_of`.
        """
        (self._rank,) = job.connect()
        self._schedule, self._layers = schedule, layers
        self._cap, self._costs = config.memory_cap, config.costs
        if schedule.slices > 1 and self._costs is not None and self._costs.bytes is not None:
            # The bytes may be those of whole micro-batches. Without a limit in bytes, a rank saves
            # as much as in the order of the schedule.
            self._cap = self._costs = None
        #: The version of the layers for which the envelope was computed.
        self._version: int | None = None
        self._envelope: Envelope | None = None

    def __call__(self) -> Envelope:
        """Returns the envelope of a new batch, of which no action has run."""
        if self._envelope is None or self._version != self._layers.version:
            self._version = self._layers.version
            edges, shared = (
                self._layers.owned_stages.edges(training=True),
                self._stages_share_tensors(),
            )
            self._envelope = Envelope(
                self._schedule, self._rank, edges, self._cap, self._costs, shared
            )
        self._envelope.restart()
        return self._envelope

    def _stages_share_tensors(self) -> bool:
        """Whether two stages of this rank can reach the same tensor, a parameter or any other."""
        placement, owned = self._schedule.placement, self._layers.owned_stages
        stages = placement.stages_of(self._rank)
        if len(stages) == 1:
            return False
        # The loss functions belong to the last stage, and may reach tensors of its layers.
        of_layers, range_of = owned.tensors(), self._layers.partition.range_of
        ids_by_stage: list[set[int]] = []
        for stage in stages:
            roots: list[object] = [*owned.layers(stage).values()]
            if stage == placement.stages - 1:
                roots += self._layers.loss_functions()
            tensors = [tensor for number in range_of(stage) for tensor in of_layers.get(number, ())]
            reached = find_reachable([*roots, *tensors]).values()
            ids_by_stage.append(
                {id(value) for value in reached if isinstance(value, paddle.Tensor)}
            )
        return any(first & second for first, second in itertools.combinations(ids_by_stage, 2))


def _require_no_order(
    config: PipelineConfig, job: Job, layers: PipelineLayer, exchanges: bool
) -> None:
    """Refuses options and layers that do not allow to reorder actions.

    The arguments are those of :func:`without_fusion_if_reordered`.
    """
    together = [axis for axis in (*SHARDS, *SEQUENCE, "ep") if getattr(job.degrees, axis) > 1]
    synced = any(isinstance(layer, paddle.nn.SyncBatchNorm) for layer in layers.sublayers())
    reason = fix = ""
    if together:
        reason = f"ranks along {', '.join(together)} compute each action together"
        fix = "set the degrees of these axes to 1"
    elif exchanges or (synced and job.copies().ranks > 1):
        reason = "replicas exchange values in an action: experts that they share, or SyncBatchNorm"
        fix = "use layers that each replica computes alone"
    elif not all(hasattr(peers, "await_any") for peers in job.connect().values()):
        reason = "Paddle's process groups hand values over in the order of their sends"
        fix = "set strategy.fleetpipe_configs = {'transport': 'sockets'} too"
    elif config.rng == FLEET:
        reason = "layers draw random numbers from one generator in the order in which they run"
        fix = "leave rng='fleet' out"
    if reason:
        raise ConfigError(
            "order='ready' cannot be had here",
            where="strategy.fleetpipe_configs",
            cause=reason,
            fix=f"{fix}; or leave order out",
        )


class Runtime:
    """The schedule, stage and engines that run the batches of one model in this process.

    Attributes:
        layers: The model.
        job: The job in which it was wrapped.
        config: The options of its pipeline.
        switches: The options of ``pp_configs``.
        sequence: The ranks that split the same sequences among them.
        bubbles: The number of bubbles of a rank in which hooks are called.
        schedule: The schedule that a training batch runs.
        plan: The lowered schedule.
        units: How the schedule cuts micro-batches into sequence chunks.
        weights: The weights of micro-batches in the loss.
        data: Cuts, compares and exchanges the data of batches.
        keys: Draws the seeds of batches.
        stage: Runs the actions of this process's stages.
        engines: Run the plan, with observers around its operations.
        reductions: Sums gradients and averages losses over ranks.
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
    #: The version of the layers in the last training batch; -1 before the first.
    _version: int

    def __init__(
        self, layers: PipelineLayer, strategy: Strategy, job: Job, has_bubble_hooks: bool
    ) -> None:
        """Builds, verifies and lowers the schedule, and connects the ranks. Collective.

        Args:
            layers: The model.
            strategy: The options.
            job: The current job.
            has_bubble_hooks: Whether the wrapper calls hooks in bubbles, as Fleet's does.

        Raises:
            ConfigError: An option is wrong.
            ScheduleError: The schedule exceeds the memory limit.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        self.layers = layers
        self.job = job
        self.switches = Switches.from_strategy(strategy, layers)
        #: Whether a batch of this model is running.
        self._running = False
        layers.follow()
        layers.require_listed()
        self.sequence: Group = job.sequence()
        self.bubbles = 2 * job.degrees.pp - 2 if has_bubble_hooks else 0
        scale, timed = scale_strategy(strategy), self.switches.enable_timer
        self.reductions = Reductions(layers, job, scale, timed)
        kinds = self.reductions.kinds
        #: Whether layers exchange values with other ranks within an action.
        self._exchanges = any(kind.exchanges for kind in kinds) or job.degrees.sep > 1
        self._build_schedule(PipelineConfig.from_strategy(strategy))
        self.keys: BatchKeys = BatchKeys(layers, job, self.config.rng)
        self.engines = Engines(job)
        # A layer that the script built may be in several pipelines, all on the same rank.
        for reference in () if job.local else job.pipelines:
            earlier = reference()
            if earlier is not None:
                refuse_layers_on_different_ranks(layers.built_layers(), earlier.built_layers())
        job.pipelines.append(weakref.ref(layers))
        with job.guarded(lambda: "wrapping the model"):
            self._connect()
            job.require_agreement(self._facts_to_compare())
            share_state(layers, job)

    @property
    def first_micro_batch(self) -> int:
        """The global number of this process's micro-batch 0: replicas continue the numbering."""
        return self.job.copy * self.config.micro_batches

    def resize(self, micro_batches: int, micro_batch_size: int) -> None:
        """Changes the number and the size of micro-batches from the next batch on.

        Args:
            micro_batches: The number of micro-batches of a batch.
            micro_batch_size: The number of rows of a micro-batch.

        Raises:
            ConfigError: They do not fit the schedule.
            StateError: Numbered hooks or a trace count actions.
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
        self._build_schedule(config)
        self._connect()

    def require_running(self) -> Job:
        """Returns the job; refuses a batch if the job has ended or another batch runs.

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
        with self._exclusive():
            return now

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """While this context is open, another batch is refused: of another thread, or of a hook."""
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
        """Draws the seeds of a batch that runs forward only, and puts the layers into its mode.

        A rank that does not run the batch calls this, too, so that all ranks draw as many numbers.

        Returns:
            The seeds; None under ``"fleet"``.
        """
        keys = self.keys.draw(training=False)
        self.layers.begin(training=False)
        return keys

    @contextmanager
    def running(
        self, batch: Batch, evaluated: int | None = None, units: Units = WHOLE
    ) -> Iterator[Run]:
        """Prepares a batch, which can run while this context is open; ends it afterwards.

        A failure on another rank ends this rank's waits, and a failure here reaches all ranks. A
        training batch that fails leaves no gradients; if this process plays all ranks, it restores
        the buffers of the layers too.

        Args:
            batch: The batch.
            evaluated: The number of micro-batches of a batch that runs forward only; None for a
                training batch.
            units: How a batch that runs forward only is cut into units, and what layers keep from
                one unit to the next. A training batch is cut as its schedule says.

        Yields:
            The function that runs the batch once; see :data:`Run`.

        Raises:
            StateError: Another batch runs in this process.
            ConfigError: A stage uses a parameter of another rank.
            BoundaryError: A stage uses a value that a stage of another rank has stored.
            PeerFailed: Another rank failed.
            PipelineTimeout: Another rank did not send or arrive within the limit.
        """
        training, engines = evaluated is None, self.engines
        engine = engines.training if evaluated is None else engines.evaluation(evaluated)
        with self._exclusive():
            units = self.units if training else units
            first = self.first_micro_batch * units.count
            if training and self._version != self.layers.version:
                # The script has put other layers into the model.
                self.layers.require_listed()
                self.stage.split.forget_layers()
                self.stage.watch = self.layers.hidden_uses()
                self._version = self.layers.version
            # Finds stages that use values or parameters of other ranks; None if there are none.
            watch = self.stage.watch
            hooks = engines.hook_calls.of_batch(training)
            trees = self.reductions.begin_trees(self.config.micro_batches) if training else None
            self.stage.begin(batch, first, hooks, units, trees)
            self.reductions.losses = batch.losses if self.data.owns_last else None
            # On several ranks the job ends with the failed batch.
            restores = training and self.job.local
            models = [self.layers, *self.layers.loss_layers()] if restores else []
            put_back = buffers_kept(models)
            try:
                with (
                    self.job.guarded(engine.where),
                    self.job.limited_by_card(),
                    self.reductions.own_errors(),
                    # An error that such a use causes names the use.
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

    def _facts_to_compare(self) -> dict[str, str]:
        """Returns texts that must be equal on all ranks, by their names in messages."""
        facts = meeting.facts(self.config, self.switches)
        facts["gradient scale"] = self.reductions.scale
        facts.update({f"layer {i}": text for i, text in enumerate(self.layers.state.outlines())})
        facts["cut"] = str(self.layers.segment_parts)
        return facts

    def _build_schedule(self, config: PipelineConfig) -> None:
        """Builds, verifies and lowers the schedule of ``config``, and creates the stage to run it.

        An error leaves the runtime as it was.
        """
        layers, delayed = self.layers, self.switches.delay_scale_loss
        schedule = layers.arrangement.schedule(config)
        schedule = without_fusion_if_reordered(schedule, config, self.job, layers, self._exchanges)
        scale = self.reductions.scale
        weights = MicroBatchWeights(config, self.job, delayed, scale, layers.loss_functions)
        units = units_of(self, schedule, config)
        if self.job.sums_by_tree:
            parameters = layers.trained_parameters()
            sliced, placement = units.count > 1, schedule.placement
            refuse_beside_trees(parameters, delayed, sliced, placement, config.rng)
        plan = schedule.lower(layers.owned_stages.edges(training=True))
        plan.verify()
        # The checks are over: a refused option has changed nothing.
        self.config, self.schedule, self.plan = config, schedule, plan
        self.weights, self.units = weights, units
        self.data = RankData(self.job, schedule.placement, config)
        self.stage = DygraphStage.of(layers.owned_stages, schedule, config.fast_leaves)
        self._version = -1

    def _connect(self) -> None:
        """Builds the engines. Collective over the pipeline the first time in a job."""
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
