"""The public classes of schedules and plans, with methods for all that users do with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property

from fleetpipe.errors import require_whole
from fleetpipe.schedules.check import linear_order, verify, verify_plan
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.forms.text import read_plan, read_schedule, write_plan, write_schedule
from fleetpipe.schedules.placement import Edge, Placement
from fleetpipe.schedules.rows import PlanRows, ScheduleRows, computations
from fleetpipe.schedules.simulation import Timeline, lower, simulate


class Schedule(ScheduleRows):
    """Computations of every rank in order; communication is derived from it, never written.

    Immutable and hashable; its fields are those of :class:`ScheduleRows`. ``str(schedule)`` and
    :meth:`parse` are exact inverses::

        >>> print(build("1F1B", ranks=2, micro_batches=2))
        # fleetpipe-schedule 1 name=1F1B ranks=2 micro_batches=2 chunks=1 placement=loop
        F0.0 F0.1 B0.0 B0.1
        F1.0 B1.0 F1.1 B1.1
    """

    @classmethod
    def of(cls, rows: ScheduleRows) -> Schedule:
        """Returns the schedule that has the fields of some plain rows."""
        return cls(**{field.name: getattr(rows, field.name) for field in fields(rows)})

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the text form: a header and a line for each rank. Verifies nothing.

        Raises:
            ScheduleError: Names the line, the token and what was expected.
        """
        return cls.of(read_schedule(text))

    def __str__(self) -> str:
        return write_schedule(self)

    def verify(
        self,
        edges: Iterable[Edge] | None = None,
        memory_cap: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Checks that the schedule is complete, in order, free of deadlock and within memory.

        Args:
            edges: Values that pass between stages; None means the chain, in which each stage sends
                one value to the next.
            memory_cap: Most that a rank may hold at once; None means no limit. Compared with
                ``Timeline.peak_bytes`` if ``costs`` gives bytes, else with
                ``Timeline.peak_activations``: forwards of one stage, of all slices of a micro-batch
                together.
            costs: Says what I releases, and bytes; times do not matter here. Default ``Costs()``.

        Raises:
            ScheduleError: Names the culprit, its rank and its position (counted from 0).
        """
        verify(self, edges, memory_cap, costs)

    def simulate(self, costs: Costs | None = None, edges: Iterable[Edge] | None = None) -> Timeline:
        """Returns when each action begins and ends, the bubble, and the memory in use.

        Args:
            costs: What each action costs; None means F = I = W = 1, B = 2, no latency. One figure
                for all stages leaves out the loss after a head, which then takes no time.
            edges: Values that pass between stages; None means a chain of stages.

        Raises:
            ScheduleError: The schedule is incomplete or deadlocks.
            ConfigError: Per-stage costs that do not fit the number of stages.
        """
        return simulate(self, costs, edges)

    def lower(self, edges: Iterable[Edge] | None = None) -> Plan:
        """Returns the plan that the engine runs: sends, receives and releases put in.

        Args:
            edges: Values that pass between stages; None means one from each stage to the next.

        Raises:
            ScheduleError: The schedule is incomplete or deadlocks.
        """
        return Plan.of(lower(self, edges))


class Plan(PlanRows):
    """What every rank does, in order; derived by ``schedule.lower()``, never written by hand.

    Immutable and hashable; its fields are those of :class:`PlanRows`. ``str(plan)`` and
    :meth:`parse` are exact inverses::

        >>> print(build("1F1B", ranks=2, micro_batches=1).lower())
        # fleetpipe-plan 1 name=1F1B ranks=2 micro_batches=1 chunks=1 placement=loop edges=0>1
        F0.0 SF0>1.0 RB0>1.0 B0.0 FREE0.0 REDUCE STEP
        RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 REDUCE STEP

    A receive only posts the receive; a later action needs its value. An edge between two stages of
    one rank has neither send nor receive.
    """

    @classmethod
    def of(cls, rows: PlanRows) -> Plan:
        """Returns the plan that has the fields of some plain rows."""
        return cls(**{field.name: getattr(rows, field.name) for field in fields(rows)})

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads the text form, as :meth:`Schedule.parse` does. Verifies nothing."""
        return cls.of(read_plan(text))

    def __str__(self) -> str:
        return write_plan(self)

    @cached_property
    def schedule(self) -> Schedule:
        """The plan's schedule: its rows with nothing but actions and fused units."""
        return Schedule.of(computations(self))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """An order of the operations of all ranks: again and again the rank that runs its next one.

        A process that runs all ranks follows it and never waits, since what an operation needs has
        run before. REDUCE of all ranks come after all computations, and all STEP after those.

        Raises:
            ScheduleError: The plan deadlocks, so there is no such order.
        """
        return linear_order(self)

    def verify(self) -> None:
        """Checks that the plan can run.

        - Its computations are a valid schedule.
        - Every action has its receives before it, every send follows the action that makes its
          value, and on each channel (source rank, target rank, direction) sends and receives agree.
        - It does not deadlock even if each send waits for its receive.
        - Activations are released once, after their last use; REDUCE and STEP end every row.

        Raises:
            ScheduleError: Names the culprit, its rank and its position (counted from 0).
        """
        verify_plan(self)
        _ = self.order


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """Returns a schedule of F only, in an order that never deadlocks on any placement.

    Args:
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.

    Raises:
        ConfigError: Fewer than one micro-batch.
    """
    from fleetpipe.schedules.families.one_f_one_b import forward_rows  # when a model evaluates

    micro_batches = require_whole("micro_batches", micro_batches)
    rows = tuple(map(tuple, forward_rows(placement, micro_batches)))
    return Schedule("ForwardOnly", placement, micro_batches, rows, forward_only=True)
