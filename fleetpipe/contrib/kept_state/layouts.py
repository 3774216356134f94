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
    def smaller(self) -> tuple[int, ...]:
        """The smaller numbers of ranks that the script's degrees allow, the largest first.

        Where it leaves the number of replicas open, that becomes a divisor of what it was: the
        samples of a batch divide by it too. Then the pipeline has fewer stages.
        """
        numbers, ranks = [], len(self.segments)
        for axis in self.segments[0].index["narrows"]:
            degree = self.degrees[axis]
            lefts = [left for left in range(1, degree) if axis == "pp" or degree % left == 0]
            numbers += [ranks * left // degree for left in reversed(lefts)]
            ranks //= degree
        # One process may play all stages.
        return tuple(number for number in numbers if number)


def complete_layouts(folder: Path) -> list[KeptLayout]:
    """Returns every layout of which all ranks have kept one step, the newest step first."""
    layouts: dict[str, list[list[Segment]]] = {}
    for file in sorted(folder.glob("rank-*")):
        try:
            segment = Segment(file)
        except FileNotFoundError:
            continue  # a rank drops what another layout had kept
        index = segment.index
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


def newest_kept(folder: Path) -> tuple[int, int, tuple[int, ...]] | None:
    """Returns the newest kept step, how many ranks kept it, and the smaller numbers of ranks."""
    kept = next(iter(complete_layouts(folder)), None)
    return kept and (kept.step, len(kept.segments), kept.smaller)
