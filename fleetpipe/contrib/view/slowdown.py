"""Computes how much time a run loses to stragglers, and to which.

In the ideal step every computation takes the mean of its kind over replicas, stages and steps,
every communication the median of its transfer time (arXiv:2505.05713). The cost of some operations
is the time that a replay gains if only they are ideal. Start with ``slowdown_of``.

A straggler is a rank, a stage, a replica, a link or a micro-batch: an operation is compared with
the median of its kind. A stage is slow if all its replicas are, a replica if all its stages are, a
micro-batch if all ranks take long for it; a rank is slow if its stage and its replica do not
explain its times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fleetpipe.contrib.view.trace_replay import ReplayedStep
from fleetpipe.contrib.view.traced_ops import COMMUNICATIONS, TRANSFERS, TracedOperation
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Costs, SliceNumber, build

#: Factors below this one count as noise.
LEAST = 1.1

Key = TypeVar("Key")
Place = TypeVar("Place")

#: An operation, and its seconds without waits, or these over others.
TimedOperation = tuple[TracedOperation, float]
#: Whether an operation belongs to a set that is made ideal.
Member = Callable[[TracedOperation], bool]

#: The share of ranks that M_W takes for the slowest.
SLOWEST = 0.03

#: The schedules that are tried, of one model part on each rank.
NAMES = ("FThenB", "1F1B", "ZBH1", "ZBH2")


class Cause(NamedTuple):
    """A straggler.

    Attributes:
        kind: "rank", "stage", "replica", "link" or "micro-batch".
        name: Its name, for people.
        factor: Its time over that of its peers.
        share: The share of the lost time that is gained if it is ideal; it may exceed 1.
    """

    kind: str
    name: str
    factor: float
    share: float = 0.0


def suspects(steps: Sequence[ReplayedStep]) -> list[tuple[Cause, Member]]:
    """Returns the slowest stage, replica, rank, micro-batch and link, the worst first.

    Beside each is a test of which operations belong to it.
    """
    timed = _time_operations(steps)
    computed = _ratios([pair for pair in timed if pair[0].kind not in COMMUNICATIONS])
    moved = _ratios([pair for pair in timed if pair[0].kind in TRANSFERS])
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


def _time_operations(steps: Sequence[ReplayedStep]) -> list[TimedOperation]:
    return [
        (one, float(seconds))
        for step in steps
        for one, seconds in zip(step.operations, step.transfer_times)
    ]


def _ratios(timed: Sequence[TimedOperation]) -> list[TimedOperation]:
    """Returns each operation with its time over the median of its kind."""
    medians = _medians(timed, lambda one: one.kind)
    return [
        (one, time / medians[one.kind] if medians[one.kind] > 0 else 1.0) for one, time in timed
    ]


def _medians(
    values: Iterable[TimedOperation], key: Callable[[TracedOperation], Key]
) -> dict[Key, float]:
    grouped = _group_by_name((key(one), value) for one, value in values)
    return {name: float(np.median(group)) for name, group in grouped.items()}


def _group_by_name(values: Iterable[tuple[Key, float]]) -> dict[Key, list[float]]:
    grouped: defaultdict[Key, list[float]] = defaultdict(list)
    for name, value in values:
        grouped[name].append(value)
    return grouped


def _common(ratios: Mapping[Place, float], key: Callable[[Place], Key]) -> dict[Key, float]:
    """Returns the median ratio of each group; at most 1 for a group that is not slow throughout."""
    grouped = _group_by_name((key(place), ratio) for place, ratio in ratios.items())
    return {
        name: median if min(group) - 1 > (median - 1) / 2 else min(median, 1.0)
        for name, group in grouped.items()
        for median in [float(np.median(group))]
    }


def _link(one: TracedOperation) -> tuple[int, ...]:
    """Returns the replica of a transfer and the two stages that it connects, in order."""
    down = one.kind in ("forward-send", "backward-recv")
    peer = one.stage + (1 if down else -1)
    return (one.replica, *sorted((one.stage, peer)))


def _worst(
    kind: str, factors: Mapping[Any, float], key: Callable[[TracedOperation], object], name: str
) -> list[tuple[Cause, Member]]:
    """Returns the slowest member of a kind, if it is slow and others are not."""
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


class Slowdown(NamedTuple):
    """The result of replaying a trace.

    Attributes:
        slowdown: Mean step as replayed over the mean ideal step, S.
        last_stage: Share of the lost time due to the last stage, M_S.
        slowest_ranks: Share due to the slowest 3 % of the ranks, at least one, M_W.
        step_times: Seconds of each step: in the trace, replayed, ideal.
        ranks: The score of each rank by (replica, stage).
        links: Share due to all communications.
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
        """Returns the result as plain values: ``S, M_S, M_W, steps, ranks, causes``."""
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
    """Replays a trace, and again with each replica, stage and suspect made ideal."""
    operations = [one for step in steps for one in step.operations]
    if not any(one.duration for one in operations):
        fix = "trace with a finer clock, in seconds"
        raise ConfigError("no operation of the trace took any time", fix=fix)
    ideal = ideal_times(steps)
    stages = sorted({one.stage for one in operations})
    replicas = sorted({one.replica for one in operations})
    accused = suspects(steps)
    members: dict[object, Member] = {
        "none": lambda one: False,
        "all": lambda one: True,
        "links": lambda one: one.kind in COMMUNICATIONS,
        **{("stage", stage): _has("stage", stage) for stage in stages},
        **{("replica", replica): _has("replica", replica) for replica in replicas},
        **dict(accused),
    }
    times = _times(steps, ideal, list(members.values()))
    mean_time = dict(zip(members, times.mean(axis=0)))
    replayed, best = mean_time["none"], mean_time["all"]

    def share(time: float) -> float:
        lost = replayed - best
        return float((replayed - time) / lost) if lost > 1e-9 * replayed else 0.0

    shares = {name: share(time) for name, time in mean_time.items()}
    scores = {
        (replica, stage): min(shares["replica", replica], shares["stage", stage])
        for replica in replicas
        for stage in stages
    }
    slowest = sorted(scores, key=lambda rank: -scores[rank])[: max(1, int(SLOWEST * len(scores)))]
    without_slowest = _times(steps, ideal, [lambda one: one.rank in slowest]).mean()
    return Slowdown(
        float(replayed / best) if best else 1.0,
        shares["stage", stages[-1]],
        share(without_slowest),
        tuple((step.span, row[0], row[1]) for step, row in zip(steps, times.tolist())),
        scores,
        shares["links"],
        tuple(cause._replace(share=shares[cause]) for cause, _ in accused),
    )


def _has(field: str, value: int) -> Member:
    return lambda one: bool(getattr(one, field) == value)


def ideal_times(steps: Sequence[ReplayedStep]) -> dict[str, float]:
    """Returns the mean time of each kind of computation and the median of each communication."""
    by_kind = _group_by_name((one.kind, seconds) for one, seconds in _time_operations(steps))
    return {
        kind: float(np.median(values) if kind in COMMUNICATIONS else np.mean(values))
        for kind, values in by_kind.items()
    }


def _times(
    steps: Sequence[ReplayedStep], ideal: Mapping[str, float], members: Sequence[Member]
) -> np.ndarray:
    """Returns [steps, cases]: the seconds of each step if the operations of a case are ideal."""
    rows = []
    for step in steps:
        chosen = np.array([[member(one) for member in members] for one in step.operations])
        best = np.array([ideal[one.kind] for one in step.operations])
        rows.append(step.time(np.where(chosen, best[:, None], step.transfer_times[:, None])))
    return np.array(rows)


class Alternative(NamedTuple):
    """A step under another schedule.

    Attributes:
        name: The schedule's name.
        seconds: Time of a step, with the measured costs of each stage.
        even: Time of a step, if all stages cost the same.
    """

    name: str
    seconds: float
    even: float


def alternatives(steps: Sequence[ReplayedStep]) -> list[Alternative]:
    """Simulates schedules with the mean costs of a trace's stages; W is half of a whole backward.

    Returns:
        The schedules, the fastest first; none for a trace with several model parts on a rank, fused
        actions, slices, or a rank that computed nothing.
    """
    timed = _time_operations(steps)
    computed = [pair for pair in timed if pair[0].kind not in COMMUNICATIONS]
    for one, _ in computed:
        sliced = isinstance(one.micro_batch, SliceNumber)
        if sliced or one.part != one.stage or "|" in one.kind:
            return []
    times = _group_by_name(((one.kind, one.stage), seconds) for one, seconds in computed)
    ranks = len({stage for _, stage in times})
    if any(stage >= ranks for _, stage in times):
        return []
    micro_batches = len({one.micro_batch for one, _ in timed})
    mean = {place: float(np.mean(values)) for place, values in times.items()}
    forward = [mean.get(("F", stage), 0.0) for stage in range(ranks)]
    whole = [mean.get(("B", stage), 0.0) for stage in range(ranks)]
    input_grad = [mean.get(("I", stage), whole[stage] / 2) for stage in range(ranks)]
    weight_grad = [mean.get(("W", stage), whole[stage] / 2) for stage in range(ranks)]
    transfers = [seconds for one, seconds in timed if one.kind in TRANSFERS]
    comm = float(np.median(transfers)) if transfers else 0.0

    def step_time(name: str, costs: Sequence[Sequence[float]]) -> float:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches)
        forward, input_grad, weight_grad = map(tuple, costs)
        measured = Costs(forward, input_grad, weight_grad, comm=comm)
        return float(schedule.simulate(measured).makespan)

    costs = (forward, input_grad, weight_grad)
    even = [[float(np.mean(part))] * ranks for part in costs]
    simulated = [Alternative(name, step_time(name, costs), step_time(name, even)) for name in NAMES]
    return sorted(simulated, key=lambda one: one.seconds)
