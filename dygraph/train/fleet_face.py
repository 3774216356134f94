"""What Fleet's users ask a wrapper for: its place in the pipeline, its sizes, its hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.backports import pipeline_parallel_callbacks_
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.stage import DygraphStage
from fleetpipe.dygraph.layers.chunk import PipelineLayerChunk
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.hooks import NumberedHook, UserHooks
from fleetpipe.dygraph.observe.timers import Timers
from fleetpipe.dygraph.train.overlapping import NoOverlap
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import flatten
from fleetpipe.transport import Group

#: How Fleet spells actions in ``get_static_scheduler``; it knows no W.
_LETTERS: Mapping[str, str] = {"F": "f", "B": "b", "I": "b", "W": "w"}


class PipelineAttributes(NoOverlap, MetaParallelBase):
    """The part of a wrapper that runs nothing.

    Attributes:
        schedule: What is run.
        timers: Those of ``pp_configs.enable_timer``; None where it is off.
        callbacks: The registry of hooks by location, one for all wrappers of the process.
    """

    if TYPE_CHECKING:
        # By that of Layer a type checker takes every name for an attribute, a misspelt one too.
        __getattr__: ClassVar[None]  # type: ignore[assignment, misc]

    schedule: Schedule
    timers: Timers | None
    callbacks = pipeline_parallel_callbacks_
    #: Whether Fleet's wrapper of this type has hooks for bubbles.
    _has_bubble_hooks = False
    _job: Job
    _config: PipelineConfig
    _switches: Switches
    _hooks: UserHooks
    _stage: DygraphStage
    _losses: Losses | None = None
    _virtual_pp_rank: int | None = None

    @property
    def layers(self) -> PipelineLayer:
        """The wrapped model."""
        layers: PipelineLayer = self._layers
        return layers

    @property
    def accumulate_steps(self) -> int:
        """The number m of micro-batches of a batch. Setting it needs the same on every rank."""
        return self._config.micro_batches

    @accumulate_steps.setter
    def accumulate_steps(self, count: int) -> None:
        self._resize(count, self.micro_batch_size)

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch; may be set between batches."""
        return self._config.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(self, rows: int) -> None:
        self._resize(self.accumulate_steps, rows)

    def _resize(self, micro_batches: int, micro_batch_size: int) -> None:
        raise NotImplementedError

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._job.degrees.pp

    @property
    def stage_id(self) -> int:
        """This process's rank in the pipeline; 0 where it plays all ranks."""
        return int(self._job.hcg.get_stage_id())

    @property
    def global_rank(self) -> int:
        """This process's rank in the job."""
        return int(self._job.hcg.get_global_rank())

    @property
    def pp_group(self) -> Any:
        """Paddle's group of the ranks of this pipeline."""
        return self._job.hcg.get_pipe_parallel_group()

    @property
    def dp_group(self) -> Any:
        """Paddle's group of the ranks that hold the same stages in all data-parallel replicas."""
        return self._job.hcg.get_data_parallel_group()

    @property
    def num_model_chunks(self) -> int:
        """Chunks on each rank, v."""
        return self.schedule.placement.chunks

    @property
    def model_chunks(self) -> list[PipelineLayerChunk] | None:
        """The chunks of this process; None where v is 1."""
        return self.layers.get_model_chunks()

    @property
    def micro_batch_id(self) -> int:
        """The number within the batch of the micro-batch whose forward runs, or else the next."""
        return self._stage.micro_batch_id

    @property
    def total_loss(self) -> list[Any] | None:
        """The losses of the last batch's micro-batches, as the last stage's owner keeps them.

        A Tensor [micro-batches] for each loss function: this replica's own, weighted unless
        ``delay_scale_loss``. None on other ranks and before the first batch.
        """
        return self._losses.by_micro_batch() if self._losses else None

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same stages in all replicas."""
        return self._job.replicas()

    @property
    def weights(self) -> list[Fraction]:
        """The weight of each of this replica's micro-batches in its loss of the batch."""
        count = self.accumulate_steps
        return [Fraction(1, count if self._config.loss_reduction == "mean" else 1)] * count

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process owns the first stage, which takes the inputs.

        Args:
            ignore_virtual: Leaves :meth:`set_virtual_pipeline_rank` out of account.
        """
        return self._owns(0) and (ignore_virtual or self._virtual_pp_rank in (None, 0))

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this process owns the last stage, which takes the labels.

        Args:
            ignore_virtual: Leaves :meth:`set_virtual_pipeline_rank` out of account.
        """
        last = self.num_model_chunks - 1
        owns = self._owns(self.schedule.placement.stages - 1)
        return owns and (ignore_virtual or self._virtual_pp_rank in (None, last))

    def set_virtual_pipeline_rank(self, rank: int | None) -> None:
        """Says which chunk :meth:`is_pipeline_first_stage` and its like are asked of.

        Nothing that runs looks at it: actions name stages.
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

    def register_forward_pipeline_parallel_hook(self, location: int, hook: NumberedHook) -> None:
        """Adds ``hook(location)``, called before that forward of this rank in each training batch.

        Raises:
            ConfigError: ``location`` is not below :attr:`forward_pipeline_parallel_hook_capacity`.
        """
        self._hooks.forward.register_hook(location, hook)

    def register_backward_pipeline_parallel_hook(self, location: int, hook: NumberedHook) -> None:
        """Adds ``hook(location)``, called before that backward of this rank in each training batch.

        Raises:
            ConfigError: ``location`` is not below :attr:`backward_pipeline_parallel_hook_capacity`.
        """
        self._hooks.backward.register_hook(location, hook)

    def register_bubble_pipeline_parallel_hook(self, location: int, hook: NumberedHook) -> None:
        """Adds ``hook(location)``, called where this rank of an interleaved pipeline waits.

        Raises:
            ConfigError: ``location`` is not below :attr:`bubble_pipeline_parallel_hook_capacity`.
        """
        self._hooks.bubble.register_hook(location, hook)

    @property
    def forward_pipeline_parallel_hook_capacity(self) -> int:
        """Forwards of a rank in a batch: m * v."""
        return self._hooks.forward.hooks_capacity

    @property
    def backward_pipeline_parallel_hook_capacity(self) -> int:
        """Backwards of a rank in a batch: m * v."""
        return self._hooks.backward.hooks_capacity

    @property
    def bubble_pipeline_parallel_hook_capacity(self) -> int:
        """Bubbles of a rank in a batch: 2p - 2 where the schedule is interleaved, else 0."""
        return self._hooks.bubble.hooks_capacity

    def get_static_scheduler(self) -> str:
        """Returns what this rank runs in a batch, in Fleet's spelling.

        Returns:
            ``"f0;f1;b0;"`` where each rank has one chunk, else ``"f0_vp0;f0_vp1;"``: the number
            after ``vp`` is the chunk on the rank. ``w`` is the W of a split backward, ``b`` its I.
        """
        stages = self.schedule.placement.stages_of(self.stage_id)
        text = ""
        for kind, stage, micro_batch in flatten(self.schedule.actions[self.stage_id]):
            chunk = f"_vp{stages.index(stage)}" if len(stages) > 1 else ""
            text += f"{_LETTERS[kind]}{micro_batch}{chunk};"
        return text

    def timer_printer(self) -> None:
        """Logs the timers of ``pp_configs.enable_timer``, where it is on, and resets them."""
        if self.timers is not None:
            self.timers.log(self.timers.timers)

    def _owns(self, stage: int) -> bool:
        return self._job.local or self.schedule.placement.rank_of(stage) == self.stage_id

    def _loss_functions(self, index: int) -> list[Any]:
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
