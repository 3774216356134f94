"""Checks whether a schedule can run: complete, in order, free of deadlock, within its memory."""

from __future__ import annotations

from collections.abc import Iterable

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.explain import where
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation.replay import replay
from fleetpipe.schedules.simulation.timeline import amounts_in_flight


def verify(
    schedule: ScheduleRows,
    edges: Iterable[Edge] | None = None,
    memory_cap: float | None = None,
    costs: Costs | None = None,
) -> None:
    """Checks a schedule; see ``Schedule.verify``."""
    replay(schedule, edges, Costs())
    if memory_cap is not None:
        _check_memory(schedule, memory_cap, costs or Costs())


def _check_memory(schedule: ScheduleRows, cap: float, costs: Costs) -> None:
    if not cap > 0:
        raise ConfigError(
            "`memory_cap` must be above 0", got=str(cap), fix="give a cap above 0, or leave it out"
        )
    in_bytes = costs.bytes is not None
    unit = "bytes of activations" if in_bytes else "forwards of one stage"
    # Whatever a schedule cuts sequences into, a cap means as much: forwards of a micro-batch.
    parts = 1 if in_bytes else schedule.slices
    costs.check_stages(schedule.placement.stages)
    for rank in range(schedule.placement.ranks):
        around = amounts_in_flight(schedule, rank, costs, in_bytes=in_bytes)
        in_flight = [amount.during / parts for amount in around]
        peak = max(in_flight, default=0)
        if peak > cap:
            position = next(index for index, amount in enumerate(in_flight) if amount > cap)
            item = schedule.actions[rank][position]
            raise ScheduleError(
                f"rank {rank} passes the memory cap at {item}",
                where=where(schedule, rank, position),
                expected=f"at most {cap:.10g} {unit} in flight at a time",
                got=f"{in_flight[position]:.10g} there, {peak:.10g} at the peak of the rank",
                fix=f"a cap of {peak:.10g}, or a schedule that holds less",
            )
