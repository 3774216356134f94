"""A plan is a schedule lowered: each rank's row with sends, receives, releases and the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.action import Action, Fused
from fleetpipe.schedules.check.deadlock import linear_order
from fleetpipe.schedules.check.plan import verify_plan
from fleetpipe.schedules.edges import Edge, checked_edges, parse_edge
from fleetpipe.schedules.forms import text as _text
from fleetpipe.schedules.operations import Op, parse_op
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.schedule import Schedule

_FORM = "fleetpipe-plan"


@dataclass(frozen=True, repr=False)
class Plan:
    """What every rank does, in order; derived by ``schedule.lower()``, never written by hand.

    Immutable and hashable. ``str(plan)`` and :meth:`parse` are exact inverses::

        >>> print(build("1F1B", ranks=2, micro_batches=1).lower())
        # fleetpipe-plan 1 name=1F1B ranks=2 micro_batches=1 chunks=1 placement=loop edges=0>1
        F0.0 SF0>1.0 RB0>1.0 B0.0 FREE0.0 REDUCE STEP
        RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 REDUCE STEP

    A receive says "post it here"; its value is needed by an action that follows. An edge between
    two stages of one rank has neither send nor receive.

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

    @cached_property
    def schedule(self) -> Schedule:
        """The computations of the plan alone."""
        rows = tuple(tuple(op for op in row if isinstance(op, (Action, Fused))) for row in self.ops)
        return Schedule(self.name, self.placement, self.micro_batches, rows, self.forward_only)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """One linear order of all ranks' ops: the rank whose next op is to run, again and again.

        One process that plays all ranks follows it and never has to wait: what an op needs was
        done before. All ranks' REDUCE come after all computations, and all STEP after those.

        Raises:
            ScheduleError: The plan deadlocks, so there is no such order.
        """
        return linear_order(self)

    def verify(self) -> None:
        """Checks the plan.

        - Its computations are a valid schedule.
        - Every action has its receives before it, every send follows the action that makes its
          value, and on each channel (source rank, target rank, direction) sends and receives agree.
        - It does not deadlock even if each send waits for its receive.
        - Activations are released once, after their last use; REDUCE and STEP end every row.

        Raises:
            ScheduleError: Names the culprit, its rank and its position (counted from 0).
        """
        verify_plan(self)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads the text form: a header and a line for each rank. Verifies nothing.

        Raises:
            ScheduleError: Names the line, the token and what was expected.
        """
        document: tuple[_text.Header, tuple[tuple[Op, ...], ...]] = _text.read(
            _FORM, text, parse_op, "F0.3, SF0>1.3, RF0>1.3, SB.., RB.., FREE0.3, REDUCE or STEP"
        )
        header, rows = document
        return cls(
            header.name,
            header.placement,
            header.micro_batches,
            _parse_edges(header.edges or "", header.placement.stages),
            rows,
            header.forward_only,
        )

    def __str__(self) -> str:
        edges = ",".join(map(str, self.edges))
        header = _text.Header(
            self.name, self.placement, self.micro_batches, self.forward_only, edges
        )
        return _text.write(_FORM, header, self.ops)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.name}: {self.placement.ranks} ranks, {self.micro_batches} micro-batches,"
            f" {sum(map(len, self.ops))} ops>"
        )


def _parse_edges(text: str, stages: int) -> tuple[Edge, ...]:
    edges = []
    for word in text.split(",") if text else ():
        edge = parse_edge(word)
        if edge is None:
            raise ScheduleError(
                f"cannot read the edge {word!r}",
                where="line 1, the header",
                expected="edges like 0>1 or 0>2:mask, separated by commas",
            )
        edges.append(edge)
    try:
        ordered = checked_edges(edges, stages)
    except ConfigError as error:
        raise ScheduleError(str(error), where="line 1, the header") from error
    if list(ordered) != edges:
        raise ScheduleError(
            "the edges are not sorted",
            where="line 1, the header",
            expected=",".join(map(str, ordered)),
            got=text,
        )
    return ordered
