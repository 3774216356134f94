"""A schedule is a value: where the stages are, and an ordered row of actions for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.action import Item, parse_item
from fleetpipe.schedules.check.schedule import verify
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.forms import text as _text
from fleetpipe.schedules.placement import Placement, check_count
from fleetpipe.schedules.play.encoding import Encoding, encode
from fleetpipe.schedules.play.timeline import Timeline, simulate

if TYPE_CHECKING:
    from fleetpipe.schedules.plan import Plan

_FORM = "fleetpipe-schedule"


@dataclass(frozen=True, repr=False)
class Schedule:
    """Computations of every rank in order; communication is derived from it, never written.

    Immutable and hashable. ``str(schedule)`` and :meth:`parse` are exact inverses::

        >>> print(build("1F1B", ranks=2, micro_batches=2))
        # fleetpipe-schedule 1 name=1F1B ranks=2 micro_batches=2 chunks=1 placement=loop
        F0.0 F0.1 B0.0 B0.1
        F1.0 B1.0 F1.1 B1.1

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
            raise ConfigError("the name of a schedule is one word", got=repr(self.name))
        check_count("micro_batches", self.micro_batches)
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(
                "a schedule has one row of actions for each rank",
                expected=f"{self.placement.ranks} rows",
                got=f"{len(self.actions)}",
            )

    @cached_property
    def encoding(self) -> Encoding:
        """The schedule as integers. Raises ScheduleError where it is not complete."""
        return encode(self)

    def verify(
        self,
        edges: Iterable[Edge] | None = None,
        memory_cap: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        """Checks that the schedule is complete, in order, free of deadlock and within memory.

        Args:
            edges: Values that pass between stages; None means the chain.
            memory_cap: Most that a rank may hold at once; None means no limit. In the sense of
                ``Timeline.peak_bytes`` where ``costs`` gives bytes, else of
                ``Timeline.peak_activations``: forwards of one stage.
            costs: Says what I releases, and bytes; times do not matter here. Default ``Costs()``.

        Raises:
            ScheduleError: Names the culprit, its rank and its position (counted from 0).
        """
        verify(self, edges, memory_cap, costs)

    def simulate(self, costs: Costs | None = None, edges: Iterable[Edge] | None = None) -> Timeline:
        """Returns when every action begins and ends.

        Args:
            costs: What each action costs; None means F = I = W = 1, B = 2, no latency.
            edges: As for :meth:`verify`.

        Raises:
            ScheduleError: The schedule is incomplete or deadlocks.
            ConfigError: Per-stage costs that do not fit the number of stages.
        """
        return simulate(self, costs, edges)

    def lower(self, edges: Iterable[Edge] | None = None) -> Plan:
        """Returns the plan that the engine runs: sends, receives and releases put in.

        Args:
            edges: As for :meth:`verify`.

        Raises:
            ScheduleError: The schedule is incomplete or deadlocks.
        """
        from fleetpipe.schedules.play.lower import (
            lower,  # a plan knows schedules, so a schedule imports it late
        )

        return lower(self, edges)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the text form: a header and a line for each rank. Verifies nothing.

        Raises:
            ScheduleError: Names the line, the token and what was expected.
        """
        document: tuple[_text.Header, tuple[tuple[Item, ...], ...]] = _text.read(
            _FORM, text, parse_item, "an action like F0.3 or (F0.3|B1.2)"
        )
        header, rows = document
        return cls(header.name, header.placement, header.micro_batches, rows, header.forward_only)

    def __str__(self) -> str:
        header = _text.Header(self.name, self.placement, self.micro_batches, self.forward_only)
        return _text.write(_FORM, header, self.actions)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.placement.ranks} ranks, {self.micro_batches}"
            f" micro-batches, {self.placement.chunks} chunks, {self.placement.name}>"
        )
