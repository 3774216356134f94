"""Builds a verified schedule from the options of a strategy or of a command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetpipe.schedules.api import Schedule
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.registry import AUTO, build, canonical_name, searched_costs


def build_verified(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    options: Mapping[str, object] | None = None,
    memory_cap: float | None = None,
    costs: Costs | None = None,
    edges: Iterable[Edge] | None = None,
    placed: str | None = None,
    head: bool = False,
) -> Schedule:
    """Builds and verifies a schedule from options, each of which may be left out.

    Args:
        name: As for :func:`build`.
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m.
        chunks: Model parts of each rank, v; None for the schedule's own default.
        options: Options of the schedule, as ``groups``, ``warmup_slack``, ``slices``; one that is
            None is left out.
        memory_cap: Most that a rank may hold: forwards of one stage and a whole micro-batch, or
            bytes where ``costs`` has bytes. A search keeps within it; any other schedule that
            exceeds it is refused.
        costs: The costs of actions, for a search, and the memory of the stages.
        edges: The edges of the model; None for a chain of stages.
        placed: The placement of an existing model, which a search keeps.
        head: Whether the model has a vocabulary head.

    Raises:
        ConfigError: An unknown name or option, or numbers that the schedule does not take.
        ScheduleError: The schedule exceeds the cap, or cannot run on these edges.
    """
    wanted = dict(options or {})
    if canonical_name(name) == AUTO:
        wanted.update(memory_cap=memory_cap, costs=costs, placed=placed)
    wanted = {option: value for option, value in wanted.items() if value is not None}
    schedule = build(
        name, ranks=ranks, micro_batches=micro_batches, chunks=chunks, head=head, **wanted
    )
    if canonical_name(name) == AUTO:
        costs = searched_costs(schedule, costs)
    schedule.verify(edges, memory_cap=memory_cap, costs=costs)
    return schedule
