"""The values: what every rank computes (a schedule) and does (a plan), in order, and nothing more.

Whatever is done with them takes them as arguments. What users hold has methods for all of that:
``Schedule`` and ``Plan`` in ``api.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from fleetpipe.errors import ConfigError, ScheduleError, require_whole
from fleetpipe.schedules.action import Action, Fused, Item, flatten
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.operations import Op
from fleetpipe.schedules.options import Options
from fleetpipe.schedules.placement import Placement


@dataclass(frozen=True, repr=False)
class ScheduleRows:
    """Where the stages are, and an ordered row of computations for each rank. Hashable.

    Args:
        name: Name for people and logs, without spaces; it decides nothing.
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        actions: For each rank the actions (or fused units) in the order in which it runs them.
        forward_only: There is no backward: evaluation and prediction.
        slices: Slices that each micro-batch's sequence is cut into. More than 1: actions are of
            slices, and have :class:`SliceNumber` in the place of the micro-batch.
        options: What else the schedule was built with, where it is not the usual: pairs of a name
            and a number, a word or a tuple of them, sorted by name.

    Raises:
        ScheduleError: Not one row for each rank, or an action that names no slice.
        ConfigError: A name with a space, or fewer than one micro-batch or slice.
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Item, ...], ...]
    forward_only: bool = False
    slices: int = 1
    options: Options = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        if self.name.split() != [self.name]:
            raise ConfigError(
                "the name of a schedule is one word",
                got=repr(self.name),
                fix="join its words with hyphens",
            )
        for field in ("micro_batches", "slices"):
            object.__setattr__(self, field, require_whole(field, getattr(self, field)))
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(
                "a schedule has one row of actions for each rank",
                expected=f"{self.placement.ranks} rows",
                got=f"{len(self.actions)}",
                fix="give each rank a row, an empty one where it is idle",
            )
        for action in flatten(chain.from_iterable(self.actions)) if self.slices > 1 else ():
            if getattr(action.micro_batch, "slices", 1) != self.slices:
                raise ScheduleError(
                    f"{action} is of no slice",
                    expected=f"a SliceNumber of {self.slices} slices in the place of a micro-batch",
                    fix=f"name it with SliceNumber(micro_batch, index, {self.slices})",
                )

    @property
    def units(self) -> int:
        """What actions of one stage count: the micro-batches of a batch, or the slices of all."""
        return self.micro_batches * self.slices

    @property
    def splits_backward(self) -> bool:
        """Whether some gradients of weights are computed apart from those of inputs."""
        return any(action.kind == "I" for row in self.actions for action in flatten(row))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches{in_slices(self.slices)},"
            f" {self.placement.chunks} chunks,"
            f" {self.placement.name}>"
        )


@dataclass(frozen=True, repr=False)
class PlanRows:
    """A schedule lowered: each rank's row with sends, receives, releases and the step. Hashable.

    Args:
        name: Name of the schedule.
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        edges: The values that pass between stages, sorted.
        ops: For each rank what it does, in order.
        forward_only: There is no backward: evaluation and prediction.
        slices: Slices that each micro-batch's sequence is cut into.
        options: As those of :class:`ScheduleRows`.
    """

    name: str
    placement: Placement
    micro_batches: int
    edges: tuple[Edge, ...]
    ops: tuple[tuple[Op, ...], ...]
    forward_only: bool = False
    slices: int = 1
    options: Options = ()

    @property
    def units(self) -> int:
        """As that of :class:`ScheduleRows`."""
        return self.micro_batches * self.slices

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches{in_slices(self.slices)},"
            f" {sum(map(len, self.ops))} ops>"
        )


def computations(plan: PlanRows) -> ScheduleRows:
    """Returns the computations of a plan alone."""
    rows = tuple(tuple([op for op in row if isinstance(op, (Action, Fused))]) for row in plan.ops)
    return ScheduleRows(
        plan.name,
        plan.placement,
        plan.micro_batches,
        rows,
        plan.forward_only,
        plan.slices,
        plan.options,
    )


def in_slices(slices: int) -> str:
    """Returns what follows a number of micro-batches in words for people."""
    return f" of {slices} slices" if slices > 1 else ""
