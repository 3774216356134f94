"""The states that all ranks of one layout have kept, as one step that any other layout restores.

It needs no Paddle: the supervisor asks it which ranks there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fleetpipe.contrib.kept_state.segment import Segment


class KeptLayout(NamedTuple):
    """The newest step that all ranks of a layout have kept completely.

    Attributes:
        degrees: The number of ranks along each axis; one process may play those of a pipeline.
        step: The step.
        segments: What each rank has kept, by rank.
    """

    degrees: Mapping[str, int]
    step: int
    segments: tuple[Segment, ...]

    @property
    def ranks_of_fewer(self) -> int:
        """The largest smaller number of ranks that the script takes; 0 for none.

        Where it leaves the number of replicas open, that becomes a divisor of what it was: the
        samples of a batch divide by it too. Else the pipeline has a stage less.
        """
        axis = next((a for a in self.segments[0].index["narrows"] if self.degrees[a] > 1), None)
        if axis is None:
            return 0
        degree = self.degrees[axis]
        smaller = range(degree - 1, 0, -1)
        left = next(one for one in smaller if axis == "pp" or degree % one == 0)
        return len(self.segments) * left // degree


def complete_layouts(folder: Path) -> list[KeptLayout]:
    """Returns every layout of which all ranks have kept one step, the newest step first."""
    layouts: dict[str, list[list[Segment]]] = {}
    for file in sorted(folder.glob("rank-*")):
        index = (segment := Segment(file)).index
        count, degrees = index["ranks"], index["degrees"]
        ranks = layouts.setdefault(f"{count} {degrees}", [[] for _ in range(count)])
        ranks[index["rank"]].append(segment)
    complete = []
    for ranks in layouts.values():
        steps = [{step for one in ones for step in one.steps()} for ones in ranks]
        newest = max(set.intersection(*steps), default=None)
        if newest is not None:
            holders = [next(one for one in ones if newest in one.steps()) for ones in ranks]
            complete.append(KeptLayout(holders[0].index["degrees"], newest, tuple(holders)))
    return sorted(complete, key=lambda one: -one.step)


def newest_kept(folder: Path, ranks: int) -> tuple[int, int, int] | None:
    """Returns the newest kept step, the number of ranks, and the next smaller one.

    None if so many ranks have not kept a step.

    Args:
        folder: Where the states of all ranks of this host are.
        ranks: How many ranks there were; 0 for those that have kept the newest step.
    """
    layouts = complete_layouts(folder)
    of_ranks = (kept for kept in layouts if len(kept.segments) == ranks or not ranks)
    kept = next(of_ranks, None)
    return kept and (layouts[0].step, len(kept.segments), kept.ranks_of_fewer)
