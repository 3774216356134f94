"""How much of a run's time is lost to stragglers, and to which.

The ideal step: every computation takes the mean of its kind over replicas, stages and steps, every
communication the median of its transfer time (arXiv:2505.05713). What some operations cost is what
the replay gains where they alone are ideal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.why.causes import Cause, Member, suspects
from fleetpipe.why.operations import COMMUNICATIONS
from fleetpipe.why.replay import ReplayedStep

#: The share of ranks that M_W takes for the slowest.
SLOWEST = 0.03


class Slowdown(NamedTuple):
    """What a replay says of a trace.

    Attributes:
        slowdown: Mean step as replayed over the mean ideal step, S.
        last_stage: Share of the lost time that is the last stage's, M_S.
        slowest_ranks: Share of the three slowest of a hundred ranks, at least one, M_W.
        step_times: Seconds of each step: as the trace has it, replayed, ideal.
        ranks: By (replica, stage) the score of each rank.
        links: Share of all communications.
        causes: The likeliest one of each kind, the greatest factor first; none within noise.
    """

    slowdown: float
    last_stage: float
    slowest_ranks: float
    step_times: tuple[tuple[float, float, float], ...]
    ranks: Mapping[tuple[int, int], float]
    links: float
    causes: tuple[Cause, ...]

    def as_json(self) -> dict[str, object]:
        """Returns it as plain values: ``S, M_S, M_W, steps, ranks, causes``."""
        return {
            "S": self.slowdown,
            "M_S": self.last_stage,
            "M_W": self.slowest_ranks,
            "steps": [dict(zip(("measured", "replayed", "ideal"), one)) for one in self.step_times],
            "ranks": [
                {"replica": replica, "stage": stage, "score": score}
                for (replica, stage), score in self.ranks.items()
            ],
            "links": self.links,
            "causes": [cause._asdict() for cause in self.causes],
        }


def slowdown_of(steps: Sequence[ReplayedStep]) -> Slowdown:
    """Replays a trace, and again with each replica, stage and suspect made ideal.

    Args:
        steps: What :func:`~fleetpipe.why.replay.steps_of` makes of a trace.
    """
    everything = [one for step in steps for one in step.operations]
    ideal = ideal_times(steps)
    stages = sorted({one.stage for one in everything})
    replicas = sorted({one.replica for one in everything})
    last = stages[-1]
    sets: dict[tuple[str, object], Member] = {
        ("none", 0): lambda one: False,
        ("all", 0): lambda one: True,
        ("last", 0): lambda one: one.stage == last,
        ("links", 0): lambda one: one.kind in COMMUNICATIONS,
    }
    sets.update({("stage", stage): _of("stage", stage) for stage in stages})
    sets.update({("replica", replica): _of("replica", replica) for replica in replicas})
    accused = suspects(steps)
    sets.update({("cause", number): member for number, (_, member) in enumerate(accused)})
    times = _times(steps, ideal, list(sets.values()))
    taken = dict(zip(sets, times.mean(axis=0)))
    whole, best = taken["none", 0], taken["all", 0]

    def share(time: float) -> float:
        lost = whole - best
        return float((whole - time) / lost) if lost > 1e-9 * whole else 0.0

    scores = {
        (replica, stage): min(share(taken["replica", replica]), share(taken["stage", stage]))
        for replica in replicas
        for stage in stages
    }
    slowest = sorted(scores, key=lambda rank: -scores[rank])[: max(1, int(SLOWEST * len(scores)))]
    return Slowdown(
        float(whole / best) if best else 1.0,
        share(taken["last", 0]),
        share(_times(steps, ideal, [lambda one: one.rank in slowest]).mean()),
        tuple(
            (max(one.end for one in step.operations) - step.operations[0].start, row[0], row[1])
            for step, row in zip(steps, times.tolist())
        ),
        scores,
        share(taken["links", 0]),
        tuple(
            cause._replace(share=share(taken["cause", number]))
            for number, (cause, _) in enumerate(accused)
        ),
    )


def _of(field: str, value: int) -> Member:
    return lambda one: bool(getattr(one, field) == value)


def ideal_times(steps: Sequence[ReplayedStep]) -> dict[str, float]:
    """Returns the mean seconds of each computation's kind, the median of each communication's."""
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for one, seconds in zip(step.operations, step.transfer_times):
            by_kind[one.kind].append(float(seconds))
    return {
        kind: float(np.median(values) if kind in COMMUNICATIONS else np.mean(values))
        for kind, values in by_kind.items()
    }


def _times(
    steps: Sequence[ReplayedStep], ideal: Mapping[str, float], members: Sequence[Member]
) -> np.ndarray:
    """Returns [steps, cases]: the time of each step where the operations of a case are ideal."""
    rows = []
    for step in steps:
        chosen = np.array([[member(one) for member in members] for one in step.operations])
        best = np.array([ideal[one.kind] for one in step.operations])
        rows.append(step.time(np.where(chosen, best[:, None], step.transfer_times[:, None])))
    return np.array(rows)
