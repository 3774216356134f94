"""``fleetpipe estimate``: time and memory of every schedule on several numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleetpipe.profiling.candidates import Candidate, PlanTask
from fleetpipe.profiling.memory import peak_bytes
from fleetpipe.profiling.profile import Profile
from fleetpipe.profiling.sizes import show_bytes, show_seconds
from fleetpipe.representation import table


class Estimate(NamedTuple):
    """The costs of one schedule on some ranks, without recompute.

    Attributes:
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank.
        schedule: The schedule's name.
        seconds: Time of a batch, without the optimizer's step.
        peak_bytes: The most bytes that each rank uses.
    """

    ranks: int
    chunks: int
    schedule: str
    seconds: float
    peak_bytes: tuple[int, ...]


def estimates(
    profile: Profile, ranks: Iterable[int], micro_batches: int, optimizer_copies: float = 2
) -> list[Estimate]:
    """Returns the costs of every schedule, on the cut whose slowest stage is fastest.

    Args:
        profile: The costs of the layers.
        ranks: Numbers of ranks; those with more stages than layers are left out.
        micro_batches: Micro-batches of a batch, m.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.

    Returns:
        The estimates, by ranks and then by time.
    """
    rows = []
    for count in ranks:
        search = frozenset(("partition", "placement", "schedule"))
        task = PlanTask(profile, count, micro_batches, math.inf, search, optimizer_copies)
        of_ranks: dict[tuple[int, str], Estimate] = {}
        for shape in task.shapes():
            for schedule in task.schedules(shape):
                tried = [task.evaluate(schedule, cut) for cut in task.cuts(shape)]
                fitting = [one for one in tried if isinstance(one, Candidate)]
                best = min(fitting, key=lambda one: one.seconds)
                parts = [part.cut(best.boundaries) for part in task.of_slices]
                stages = task.stages.cut(best.boundaries)
                slices = parts if schedule.slices > 1 else ()
                peaks = peak_bytes(schedule, stages, optimizer_copies, slices)
                one = Estimate(count, shape.chunks, schedule.name, best.seconds, peaks)
                # Of a schedule's options the faster.
                key = shape.chunks, schedule.name
                of_ranks[key] = min(of_ranks.get(key, one), one, key=lambda each: each.seconds)
        rows += sorted(of_ranks.values(), key=lambda one: one.seconds)
    return rows


def estimates_table(estimates_shown: Sequence[Estimate], alone: float) -> str:
    """Writes the estimates as a table, with the speed-up over one rank.

    Args:
        estimates_shown: The estimates.
        alone: Seconds that one rank takes for a batch.
    """
    rows = [("ranks", "chunks", "schedule", "a batch", "speed-up", "most memory", "on rank")]
    for one in estimates_shown:
        most = max(one.peak_bytes)
        rows.append(
            (
                str(one.ranks),
                str(one.chunks),
                one.schedule,
                show_seconds(one.seconds),
                f"{alone / one.seconds:.2f}" if one.seconds else "-",
                show_bytes(most),
                str(one.peak_bytes.index(most)),
            )
        )
    return table(rows, left=(2,))
