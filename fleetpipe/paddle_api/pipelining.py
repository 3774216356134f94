"""Runs Paddle's ``auto_parallel.pipelining``: schedules of stages that a user defines; 3.3 only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import VERSION, paddle, replaced

_NAME = "paddle.distributed.auto_parallel.pipelining.schedules"

#: An action of Paddle's schedules: "F", "B", "I" or "W", the stage and the micro-batch.
PaddleAction = tuple[str, int, int]


class MicroBatchData(NamedTuple):
    """The arguments of ``step``, cut into one entry for each micro-batch.

    Attributes:
        arguments: The positional arguments of the first stage.
        keywords: The keyword arguments of this process's stages.
        targets: The targets of the loss; None without targets.
    """

    arguments: list[tuple[Nest, ...]]
    keywords: list[dict[str, Nest]]
    targets: list[Tensor] | None


class PaddleSchedule:
    """One of Paddle's schedules, as one rank of its pipeline sees it.

    Attributes:
        name: The name of its class.
        layers: The layers of this process's stages, by the number of the stage.
        stages: The number of stages of the pipeline.
        rank: This process's rank in the pipeline's group.
        members: The group's ranks in the job, in order.
        rank_of: The rank of each stage, in the group.
        micro_batches: The number of micro-batches of a batch.
        trains: Whether the schedule has a loss and a backward.
        rows: The actions of each rank, in order; None if they follow from the class.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._stages = getattr(schedule, "_stages", None) or [schedule._stage]
        first = self._stages[0]
        self.name = type(schedule).__name__
        self.layers: dict[int, Layer] = {
            stage.stage_index: stage.sublayer for stage in self._stages
        }
        self.stages: int = first.num_stages
        self.rank: int = first.group_rank
        group = first.group
        self.members = [*(range(first.group_size) if group is None else group.ranks)]
        self.rank_of: list[int] = [
            first.stage_index_to_group_rank[stage] for stage in range(self.stages)
        ]
        self.micro_batches: int = schedule._n_microbatches
        self.trains: bool = schedule._has_backward
        self.rows: list[list[PaddleAction]] | None = None
        order = getattr(schedule, "pipeline_order", None)
        if order:
            self.rows = [
                [
                    (str(action.computation_type), action.stage_index, action.microbatch_index)
                    for action in order[rank]
                    if action is not None
                ]
                for rank in sorted(order)
            ]

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return self.stages - 1 in self.layers

    def loss(self, output: Nest, target: Nest) -> Tensor:
        """Returns the loss of the next micro-batch, and stores it for the result of ``step``."""
        loss = self._schedule._compute_loss(output, target)
        self._schedule._internal_losses.append(loss)
        return loss

    def keep(self, outputs: Sequence[Nest]) -> None:
        """Stores outputs of the last stage, which ``step(return_output=True)`` joins."""
        self._stages[-1].output_chunks.extend(outputs)

    def shared(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yields, for each shared weight, the job's ranks that have it, and its gradient here."""
        # Two stages of this process may have one description.
        descriptions = {id(d): d for stage in self._stages for d in stage.shared_parameters}
        for description in descriptions.values():
            parameter = description["shared_param"]
            if parameter is not None and parameter._is_initialized():
                yield sorted(description["group"].ranks), parameter.grad._local_value()

    def begin(self, data: MicroBatchData, losses: list[Tensor] | None) -> MicroBatchData:
        """Returns a batch after Paddle's checks, and drops the losses of a batch that failed.

        Args:
            data: The arguments of ``step``.
            losses: The user's list for the losses, or None.
        """
        self._schedule._internal_losses.clear()
        arguments, keywords = self._schedule._check_inputs(*data, losses)
        return MicroBatchData(arguments, keywords, data.targets)

    def end(self, losses: list[Tensor] | None) -> None:
        """Appends the losses of the batch to the user's list, if there is one."""
        self._schedule._update_losses(self._stages, losses)


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the plain tensor inside a tensor that is distributed over a mesh of one process.

    Any other tensor is returned unchanged.

    Raises:
        ConfigError: The mesh has several processes.
    """
    if not tensor.is_dist():
        return tensor
    if len(tensor.process_mesh.process_ids) > 1:
        raise ConfigError(
            "a stage hands on a tensor that several ranks hold",
            expected="stages whose weights and data are on one rank each",
            got=str(tensor.process_mesh),
            fix="split the samples with fleet's dp_degree, and the weights with its mp_degree",
        )
    api: ModuleType = paddle.distributed.auto_parallel.api
    return api.dtensor_to_local(tensor, tensor.process_mesh, tensor.placements)


@contextmanager
def stepping(
    run: Callable[[Any, MicroBatchData, list[Tensor] | None], None], refuse: Callable[[str], None]
) -> Iterator[None]:
    """Opens a context in which ``run`` runs Paddle's schedules. It changes nothing on 2.6.2.

    Args:
        run: Called with the schedule, a batch, and the list that takes the losses.
        refuse: Called with the name of a schedule class that overrides how it runs.
    """
    if VERSION.startswith("2."):
        yield
        return
    schedules: Any = importlib.import_module(_NAME)

    def step(
        schedule: Any,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
    ) -> None:
        run(schedule, MicroBatchData(arg_mbs, kwarg_mbs, target_mbs), losses)

    def initialize(schedule: Any, *_: Any) -> None:
        refuse(type(schedule).__name__)

    single, several = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    with replaced(
        (schedules.ScheduleFThenB, "_step_microbatches", step),
        (schedules.Schedule1F1B, "_step_microbatches", step),
        (several, "_step_microbatches", step),
        (single, "_initialize_stage", initialize),
        (several, "_initialize_stages", initialize),
    ):
        yield
