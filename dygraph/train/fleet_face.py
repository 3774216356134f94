"""The attributes and hooks of Fleet's wrapper of a model; ``pipeline_parallel.py`` runs batches."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

from fleetpipe.aliases import Nest, PaddleGroup, Strategy, Tensor, Topology
from fleetpipe.dygraph.backward.added_gradients import Crossing
from fleetpipe.dygraph.batch.losses import weighted
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import Units
from fleetpipe.dygraph.layers.run_stage import PipelineLayerChunk
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.hooks import NumberedHook, Timers
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.dygraph.train.observers import observer_makers
from fleetpipe.engine.observer import Observer
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.job.job import Job, required_job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api.distributed import user_strategy
from fleetpipe.paddle_api.meta_parallel import pipeline_parallel_callbacks_
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import flatten

if TYPE_CHECKING:
    from fleetpipe.dygraph.train.runtime import Runtime
    from fleetpipe.engine.trace import Trace

#: ``register(location, hook)`` registers a numbered hook at a location.
_RegisterHook = Callable[[int, NumberedHook], None]

#: The letters of actions in ``get_static_scheduler``; W is not known to Fleet.
_FLEETS_LETTERS: Mapping[str, str] = {"F": "f", "B": "b", "I": "b", "W": "w"}


class NothingCached:
    """Stands for Fleet's helper that sends between ranks and caches shapes, which is not needed."""

    def clear_meta_cache(self) -> None:
        """Does nothing: every message carries its shape, and none is cached."""


def _from_runtime(read: Callable[[Runtime], Any]) -> Any:
    """Returns a property of the wrapper whose value is ``read(runtime)`` of its runtime."""
    return property(lambda wrapper: read(wrapper._runtime))


class PipelineFace(MetaParallelBase):
    """A wrapped model with Fleet's attributes and hooks; a subclass runs batches.

    Attributes:
        callbacks: The registry of hooks by location, one for all wrappers of the process.
    """

    if TYPE_CHECKING:
        # With the __getattr__ of Layer, a type checker would accept a misspelt attribute.
        __getattr__: ClassVar[None]  # type: ignore[assignment, misc]

    callbacks = pipeline_parallel_callbacks_
    #: Whether Fleet's wrapper of this type has hooks for bubbles.
    _has_bubble_hooks = False
    #: The chunk of :meth:`set_virtual_pipeline_rank`; None before that call.
    _virtual_pp_rank: int | None = None
    # Trainers of libraries read these (see docs/libraries.md). Gradients are reduced once, after
    # the last backward, without buffers of their own.
    _dp_comm_overlap = False
    _sharding_comm_overlap = False
    # Each message is sent by itself, not in a batch of messages.
    _use_batch_p2p_comm = False
    _chunk_2_comm_buffers: ClassVar[Mapping[int, list[object]]] = MappingProxyType({})
    _p2p_helper = NothingCached()

    layers: PipelineLayer = _from_runtime(lambda runtime: runtime.layers)
    """The wrapped model."""
    schedule: Schedule = _from_runtime(lambda runtime: runtime.schedule)
    """The schedule of a training batch."""
    units: Units = _from_runtime(lambda runtime: runtime.units)
    """How each micro-batch of a training batch is cut into sequence chunks."""
    timers: Timers | None = _from_runtime(lambda runtime: runtime.reductions.timers)
    """The timers of ``pp_configs.enable_timer``; None if it is off."""
    num_stages: int = _from_runtime(lambda runtime: runtime.job.degrees.pp)
    """The number of ranks of the pipeline."""
    num_model_chunks: int = _from_runtime(lambda runtime: runtime.schedule.placement.chunks)
    """The number of chunks on each rank, v."""
    micro_batch_id: int = _from_runtime(lambda runtime: runtime.stage.micro_batch_id)
    """The number in the batch of the micro-batch whose forward runs, or runs next."""
    slicing: int | tuple[int, ...] = _from_runtime(lambda runtime: runtime.units.slicing)
    """How the sequences of a training batch are cut: the number of chunks, or their lengths."""
    stage_id: int = _from_runtime(lambda runtime: int(runtime.job.hcg.get_stage_id()))
    """This process's rank in the pipeline; 0 if it plays all ranks."""
    global_rank: int = _from_runtime(lambda runtime: int(runtime.job.hcg.get_global_rank()))
    """This process's rank in the job."""
    pp_group: PaddleGroup = _from_runtime(lambda runtime: runtime.job.hcg.get_pipe_parallel_group())
    """Paddle's group of the ranks of this pipeline."""
    dp_group: PaddleGroup = _from_runtime(lambda runtime: runtime.job.hcg.get_data_parallel_group())
    """Paddle's group of the ranks that hold the same stages in all data-parallel replicas."""
    model_parallel: Group = _from_runtime(lambda runtime: runtime.job.model_parallel())
    """The ranks that hold the shards of this rank's layers."""
    replicas: Group = _from_runtime(lambda runtime: runtime.job.replicas())
    """The ranks that hold the same stages in all replicas."""
    sequence: Group = _from_runtime(lambda runtime: runtime.sequence)
    """The ranks that split the same sequences among them."""
    model_chunks: list[PipelineLayerChunk] | None = _from_runtime(
        lambda runtime: runtime.layers.get_model_chunks()
    )
    """The chunks of this process; None if each rank has one."""
    weights: list[Fraction] = _from_runtime(lambda runtime: runtime.weights.usual)
    """The weight of each micro-batch of this replica in the replica's loss of the batch."""
    weights_in_backward: list[Fraction] = _from_runtime(lambda runtime: runtime.weights.in_backward)
    """The weights in the loss that starts backward; 1 each under ``delay_scale_loss``."""
    weights_of_all_replicas: list[Fraction] = _from_runtime(
        lambda runtime: runtime.weights.of_all_replicas
    )
    """The weights in backward of the micro-batches of all replicas."""
    sums_by_tree: bool = _from_runtime(lambda runtime: runtime.job.sums_by_tree)
    """Whether gradients and losses are summed by trees."""
    counts_tokens: bool = _from_runtime(lambda runtime: runtime.weights.by_tokens)
    """Whether micro-batches count by their tokens: ``loss_reduction="tokens"``."""
    token_weights: Callable[[Sequence[Nest], Group], list[Fraction] | None] = _from_runtime(
        lambda runtime: runtime.weights.of_tokens
    )
    """See :meth:`MicroBatchWeights.of_tokens`. Collective."""
    counted: Callable[[Nest], float] = _from_runtime(lambda runtime: runtime.weights.counted)
    """See :meth:`MicroBatchWeights.counted`."""
    micro_batches: Callable[[Nest], MicroBatches] = _from_runtime(
        lambda runtime: runtime.data.micro_batches
    )
    """Cuts a batch into micro-batches as ``train_batch`` does, with the same errors.

    An iterator advances by these micro-batches.
    """
    shared_micro_batches: Callable[[Nest], tuple[MicroBatches, MicroBatches]] = _from_runtime(
        lambda runtime: runtime.data.share_batch
    )
    """See :meth:`RankData.share_batch`. Collective."""
    share: Callable[[MicroBatches], tuple[MicroBatches, MicroBatches]] = _from_runtime(
        lambda runtime: runtime.data.share
    )
    """See :meth:`RankData.share`. Collective."""
    from_last_stage: Callable[[Nest], list[Nest]] = _from_runtime(
        lambda runtime: runtime.data.from_last_stage
    )
    """See :meth:`RankData.from_last_stage`. Collective."""
    pass_over_forwards: Callable[[], Keys | None] = _from_runtime(
        lambda runtime: runtime.pass_over_forwards
    )
    """See :meth:`Runtime.pass_over_forwards`."""
    require_running: Callable[[], Job] = _from_runtime(lambda runtime: runtime.require_running)
    """See :meth:`Runtime.require_running`."""
    next_keys: Callable[..., Keys | None] = _from_runtime(lambda runtime: runtime.keys.peek)
    """See :meth:`BatchKeys.peek`. Collective over mp."""
    observe: Callable[[Observer], None] = _from_runtime(lambda runtime: runtime.engines.observe)
    """See :meth:`Engines.observe`."""
    accompany: Callable[[Observer | None], None] = _from_runtime(
        lambda runtime: runtime.engines.accompany
    )
    """See :meth:`Engines.accompany`."""
    trace: Trace | None = _from_runtime(lambda runtime: runtime.engines.observer("trace"))
    """The record of the actions that ran; None without ``fleetpipe_configs["trace"]``."""
    peak_held: dict[int, int] = _from_runtime(lambda runtime: runtime.engines.training.peak_held)
    """The most unreleased forwards in the last training batch, by rank that this process plays."""
    total_loss: list[Tensor] | None = _from_runtime(
        lambda runtime: (
            [
                weighted(losses, Fraction(runtime.weights.copies))
                for losses in runtime.reductions.losses.by_micro_batch()
            ]
            if runtime.reductions.losses
            else None
        )
    )
    """The losses of the last batch's micro-batches, on the owner of the last stage.

    A Tensor [micro-batches] for each loss function: the losses of this replica, weighted unless
    ``delay_scale_loss`` is on. None on other ranks and before the first batch.
    """
    gradient_of: Callable[[Tensor], Tensor | None] = _from_runtime(
        lambda runtime: runtime.reductions.gradient_of
    )
    """Returns a parameter's gradient from the last batch, or None. Collective over sharding."""
    reordered_leaves: Callable[[], list[str]] = _from_runtime(
        lambda runtime: runtime.stage.split.reordered
    )
    """Returns the layers whose split backward may add gradients in another order than a full one.

    It covers the stages of this process, after the first batch.
    """
    crossings: Callable[[], AbstractContextManager[dict[int, Crossing]]] = _from_runtime(
        lambda runtime: runtime.stage.noting_crossings
    )
    """See :meth:`DygraphStage.noting_crossings`."""
    forward_pipeline_parallel_hook_capacity: int = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.forward.hooks_capacity
    )
    """The number of forwards of a rank in a batch: m * v."""
    backward_pipeline_parallel_hook_capacity: int = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.backward.hooks_capacity
    )
    """The number of backwards of a rank in a batch: m * v."""
    bubble_pipeline_parallel_hook_capacity: int = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.bubble.hooks_capacity
    )
    """The number of bubbles of a rank in a batch: 2p - 2 if the schedule is interleaved, else 0."""
    register_forward_pipeline_parallel_hook: _RegisterHook = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.forward.register_hook
    )
    """Adds ``hook(location)``, called before forward ``location`` of this rank in training batches.

    It raises a UsageError if ``location`` is not below the number of forwards.
    """
    register_backward_pipeline_parallel_hook: _RegisterHook = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.backward.register_hook
    )
    """Adds ``hook(location)``, called before backward ``location``; raises as for forwards."""
    register_bubble_pipeline_parallel_hook: _RegisterHook = _from_runtime(
        lambda runtime: runtime.engines.hook_calls.hooks.bubble.register_hook
    )
    """Adds ``hook(location)``, called in bubble ``location`` of an interleaved pipeline's rank."""

    def __init__(
        self, layers: PipelineLayer, hcg: Topology = None, strategy: Strategy = None
    ) -> None:
        """Builds, verifies and lowers the schedule, and connects the ranks. Collective.

        Args:
            layers: The model.
            hcg: Accepted as in Fleet, without effect: the topology is that of ``fleet.init``.
            strategy: The options; None for those given to ``fleet.init``.

        Raises:
            ConfigError: An option is wrong.
            StateError: ``fleet.init`` was not called.
            UsageError: ``layers`` is no PipelineLayer.
            ScheduleError: The schedule exceeds the memory limit.
            PipelineTimeout: Another rank did not arrive within the limit.
        """
        job = required_job(
            "a pipeline is wrapped after fleet.init",
            got="no fleet.init, or a fleet.shutdown() since",
        )
        if not isinstance(layers, PipelineLayer):
            raise UsageError(
                "a pipeline wraps a PipelineLayer",
                got=type(layers).__name__,
                fix="build the model as a PipelineLayer",
            )
        strategy = strategy or user_strategy()
        # Typed here, since Paddle's own is not.
        begin_wrapper: Callable[..., None] = super().__init__
        begin_wrapper(layers, hcg or job.hcg, strategy)
        # Loaded here: a script that wraps no pipeline needs no runtime.
        runtime_class: type[Runtime] = pkgutil.resolve_name(
            "fleetpipe.dygraph.train.runtime:Runtime"
        )
        self._runtime = runtime_class(layers, strategy, job, self._has_bubble_hooks)
        # For a captured model: trains the plain model on the first batches too, and compares them.
        self.accompany(layers.companion(self))
        for make_observer in observer_makers:
            self.observe(make_observer(self))

    def __deepcopy__(self, memo: dict[int, object]) -> PipelineFace:
        """Wraps a copy of the model, such as an average of weights. Collective."""
        return type(self)(copy.deepcopy(self.layers, memo), strategy=self._strategy)

    def forward(self, *inputs: Nest, **named: Nest) -> Nest:
        """Runs the whole model on inputs, and returns its output, if this process has all stages.

        Args:
            inputs: The positional arguments of the model.
            named: The keyword arguments of the model.

        Raises:
            UsageError: Other ranks have stages of the model.
        """
        job = self._runtime.job
        if not job.local and job.degrees.pp > 1:
            raise UsageError(
                "model(inputs) cannot run a model whose stages are on several ranks",
                where=f"rank {job.hcg.get_stage_id()} of the pipeline, called outside of a batch",
                cause="a loop with a loss and a backward of its own",
                fix="give PipelineLayer your loss as loss_fn=, then call "
                "model.train_batch([inputs, labels], optimizer), or forward_backward_pipeline and "
                "optimizer.step(); for outputs model.predict_batch(inputs)",
            )
        return self.layers(*inputs, **named)

    def train(self, mode: bool = True) -> PipelineFace:
        """Sets training or evaluation mode in the layers, by their own methods."""
        self.layers.train() if mode else self.layers.eval()
        self.training = mode
        return self

    def eval(self) -> PipelineFace:
        """Sets evaluation mode in the layers, by their own methods."""
        return self.train(False)

    @property
    def accumulate_steps(self) -> int:
        """The number m of micro-batches of a batch. Set it to the same on every rank."""
        return self._runtime.config.micro_batches

    @accumulate_steps.setter
    def accumulate_steps(self, count: int) -> None:
        self._runtime.resize(count, self.micro_batch_size)

    @property
    def micro_batch_size(self) -> int:
        """The number of rows of a micro-batch; may be set between batches."""
        return self._runtime.config.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int) -> None:
        self._runtime.resize(self.accumulate_steps, rows)

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process owns the first stage, which takes the inputs.

        Args:
            ignore_virtual: Whether to ignore :meth:`set_virtual_pipeline_rank`.
        """
        is_first_chunk = ignore_virtual or self._virtual_pp_rank in (None, 0)
        return is_first_chunk and self._runtime.data.owns_first

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process owns the last stage, which takes the labels.

        Args:
            ignore_virtual: Whether to ignore :meth:`set_virtual_pipeline_rank`.
        """
        last = self.num_model_chunks - 1
        is_last_chunk = ignore_virtual or self._virtual_pp_rank in (None, last)
        return is_last_chunk and self._runtime.data.owns_last

    def set_virtual_pipeline_rank(self, rank: int | None) -> None:
        """Sets the chunk of :meth:`is_pipeline_first_stage` and :meth:`is_pipeline_last_stage`.

        It changes nothing that runs, because actions name stages.
        """
        self._virtual_pp_rank = rank

    def register_hook(self, location: Any, hook: Callable[..., Any]) -> None:
        """Adds a hook around forwards and backwards, for all wrappers of this process.

        Args:
            location: One of ``PipelineParallelMicroStepLocations``.
            hook: Called with the keywords ``input_tensor`` and ``step_id``, at the end of a forward
                and around a backward also ``output_tensor``, around a backward
                ``output_tensor_grad``, at its end ``input_tensor_grad``. ``step_id`` is the number
                of the forward or backward on this rank, None in evaluation.
        """
        self.callbacks.register_hook(location, hook)

    def refused_hook(self, *_arguments: Any, **_options: Any) -> NoReturn:
        """Refuses forward hooks on the wrapper, whose ``forward`` no batch calls.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a batch runs the layers of the list, and no forward hook of the wrapped model",
            fix="make what it does a function of the list, or register it on one of its layers",
        )

    register_forward_pre_hook = register_forward_post_hook = refused_hook

    def get_static_scheduler(self) -> str:
        """Returns the actions of this rank in a batch, in Fleet's spelling.

        Returns:
            ``"f0;f1;b0;"`` if each rank has one chunk, else ``"f0_vp0;f0_vp1;"``: the number after
            ``vp`` is the chunk on the rank. ``w`` is the W of a split backward, ``b`` its I.
        """
        stages = self.schedule.placement.stages_of(self.stage_id)
        text = ""
        for kind, stage, micro_batch in flatten(self.schedule.actions[self.stage_id]):
            chunk = f"_vp{stages.index(stage)}" if len(stages) > 1 else ""
            text += f"{_FLEETS_LETTERS[kind]}{micro_batch}{chunk};"
        return text

    def timer_printer(self) -> None:
        """Logs the timers of ``pp_configs.enable_timer``, if it is on, and resets them."""
        if self.timers is not None:
            self.timers.log(self.timers.timers)

    def fused_gradient(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuses Fleet's methods that fuse gradients or reduce them within backward.

        A script that calls one of these methods must not continue as if gradients had been reduced.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "gradients are reduced once, after the last backward of a batch",
            cause="the order in which they are added up must not depend on timing",
            fix="leave it to train_batch; pp_configs dp_comm_overlap and sharding_comm_overlap may "
            "stay as they are",
        )

    bw_hook_func = fused_gradient
    register_allreduce_overlap_hook = fused_gradient
    register_sharding_comm_overlap_hook = fused_gradient
