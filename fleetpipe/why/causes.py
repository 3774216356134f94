"""What straggled: a rank, a stage, a replica, a link or a micro-batch, and by which factor.

An operation is measured by the median of its kind. A stage is slow where all its replicas are, a
replica where all its stages are, a micro-batch where all ranks take long over it; a rank is slow by
what its stage and its replica do not explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fleetpipe.why.operations import COMMUNICATIONS, TRANSFERS, TracedOperation
from fleetpipe.why.replay import ReplayedStep

#: Factors below this one are taken for noise.
LEAST = 1.1

Key = TypeVar("Key")
Place = TypeVar("Place")

#: Whether an operation belongs to a set that is made ideal.
Member = Callable[[TracedOperation], bool]


class Cause(NamedTuple):
    """Something that straggled.

    Attributes:
        kind: "rank", "stage", "replica", "link" or "micro-batch".
        name: Which, for a reader.
        factor: How many times as long it takes as its peers do.
        share: The share of the lost time that goes where it is ideal; it may pass 1.
    """

    kind: str
    name: str
    factor: float
    share: float = 0.0


def suspects(steps: Sequence[ReplayedStep]) -> list[tuple[Cause, Member]]:
    """Returns the likeliest straggler of each kind with its operations, the worst first."""
    seconds = [
        (one, float(time))
        for step in steps
        for one, time in zip(step.operations, step.transfer_times)
    ]
    computed = _ratios((one, time) for one, time in seconds if one.kind not in COMMUNICATIONS)
    moved = _ratios((one, time) for one, time in seconds if one.kind in TRANSFERS)
    several = len({one.replica for one, _ in computed}) > 1
    cells = _medians(computed, lambda one: (one.replica, one.stage, one.micro_batch))
    of_micro_batch = _common(cells, lambda cell: cell[2])
    ranks = _medians(computed, lambda one: one.rank)
    of_stage = _common(ranks, lambda rank: rank[1])
    of_replica = _common(ranks, lambda rank: rank[0]) if several else {}
    residuals = {
        (replica, stage): ratio / max(of_stage[stage], of_replica.get(replica, 1.0), 1.0)
        for (replica, stage), ratio in ranks.items()
        if several
    }
    of_link = _medians(moved, _link)
    named = [
        *_worst("stage", of_stage, lambda one: one.stage, "stage {}"),
        *_worst("replica", of_replica, lambda one: one.replica, "replica {}"),
        *_worst("rank", residuals, lambda one: one.rank, "stage {1} of replica {0}"),
        *_worst("micro-batch", of_micro_batch, lambda one: one.micro_batch, "micro-batch {}"),
        *_worst("link", of_link, _link, "stages {1} and {2} of replica {0}"),
    ]
    return sorted(named, key=lambda pair: -pair[0].factor)


def _ratios(
    seconds: Iterable[tuple[TracedOperation, float]],
) -> list[tuple[TracedOperation, float]]:
    """Returns each operation's time over the median of its kind."""
    listed = list(seconds)
    medians = _medians(listed, lambda one: one.kind)
    return [
        (one, time / medians[one.kind] if medians[one.kind] > 0 else 1.0) for one, time in listed
    ]


def _medians(
    values: Iterable[tuple[TracedOperation, float]], key: Callable[[TracedOperation], Key]
) -> dict[Key, float]:
    grouped: defaultdict[Key, list[float]] = defaultdict(list)
    for one, value in values:
        grouped[key(one)].append(value)
    return {name: float(np.median(group)) for name, group in grouped.items()}


def _common(ratios: Mapping[Place, float], key: Callable[[Place], Key]) -> dict[Key, float]:
    """Returns the median of each group's ratios where all of them agree that it is slow."""
    grouped: defaultdict[Key, list[float]] = defaultdict(list)
    for place, ratio in ratios.items():
        grouped[key(place)].append(ratio)
    return {
        name: median if min(group) - 1 > (median - 1) / 2 else min(median, 1.0)
        for name, group in grouped.items()
        for median in [float(np.median(group))]
    }


def _link(one: TracedOperation) -> tuple[int, ...]:
    """Returns the replica of a transfer and the two stages between which it went, in order."""
    down = one.kind in ("forward-send", "backward-recv")
    peer = one.stage + (1 if down else -1)
    return (one.replica, *sorted((one.stage, peer)))


def _worst(
    kind: str, factors: Mapping[Any, float], key: Callable[[TracedOperation], object], name: str
) -> list[tuple[Cause, Member]]:
    """Returns the slowest of a kind, if it is slow at all and others are not."""
    if len(factors) < 2:
        return []
    worst = max(factors, key=lambda place: factors[place])
    peers = [factor for place, factor in factors.items() if place != worst]
    factor = factors[worst] / float(np.median(peers))
    if factor < LEAST:
        return []
    words = worst if isinstance(worst, tuple) else (worst,)
    transfers = kind == "link"

    def member(one: TracedOperation) -> bool:
        return (one.kind in TRANSFERS) == transfers and key(one) == worst

    return [(Cause(kind, name.format(*words), factor), member)]
