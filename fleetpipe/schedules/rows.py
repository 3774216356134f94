"""The values: what every rank computes (a schedule) and does (a plan), in order, and nothing more.

Whatever is done with them takes them as arguments. What users hold has methods for all of that:
``Schedule`` and ``Plan`` in ``api.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.action import Action, Fused, Item
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.operations import Op
from fleetpipe.schedules.placement import Placement, check_count


@dataclass(frozen=True, repr=False)
class ScheduleRows:
    """Where the stages are, and an ordered row of computations for each rank. Hashable.

    Args:
        name: Name for people and logs, without spaces; it decides nothing.
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        actions: For each rank the actions (or fused units) in the order in which it runs them.
        forward_only: There is no backward: evaluation and prediction.

    Raises:
        ScheduleError: Not one row for each rank.
        ConfigError: A name with a space, or fewer than one micro-batch.
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Item, ...], ...]
    forward_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        if self.name.split() != [self.name]:
            raise ConfigError(
                "the name of a schedule is one word",
                got=repr(self.name),
                fix="join its words with hyphens",
            )
        check_count("micro_batches", self.micro_batches)
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(
                "a schedule has one row of actions for each rank",
                expected=f"{self.placement.ranks} rows",
                got=f"{len(self.actions)}",
                fix="give each rank a row, an empty one where it is idle",
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches, {self.placement.chunks} chunks,"
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
    """

    name: str
    placement: Placement
    micro_batches: int
    edges: tuple[Edge, ...]
    ops: tuple[tuple[Op, ...], ...]
    forward_only: bool = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name}: {self.placement.ranks} ranks,"
            f" {self.micro_batches} micro-batches, {sum(map(len, self.ops))} ops>"
        )


def computations(plan: PlanRows) -> ScheduleRows:
    """Returns the computations of a plan alone."""
    rows = tuple(tuple([op for op in row if isinstance(op, (Action, Fused))]) for row in plan.ops)
    return ScheduleRows(plan.name, plan.placement, plan.micro_batches, rows, plan.forward_only)
