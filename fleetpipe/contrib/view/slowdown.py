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
Cell = TypeVar("Cell")

#: An operation, and its seconds without waits, or these over others.
TimedOperation = tuple[TracedOperation, float]
#: Tells whether an operation belongs to a set of them.
IsMember = Callable[[TracedOperation], bool]

#: The share of ranks that M_W takes for the slowest.
SLOWEST = 0.03

#: The schedules that are tried, of one model part on each rank.
NAMES = ("FThenB", "1F1B", "ZBH1", "ZBH2")


class Cause(NamedTuple):
    """A straggler: a rank, stage, replica, link or micro-batch that is slower than its peers.

    Attributes:
        kind: "rank", "stage", "replica", "link" or "micro-batch".
        name: The name of the straggler, for people.
        factor: The straggler's time over that of its peers.
        share: The fraction of the lost time that is gained if the straggler is ideal; may exceed 1.
    """

    kind: str
    name: str
    factor: float
    share: float = 0.0


def find_suspects(steps: Sequence[ReplayedStep]) -> list[tuple[Cause, IsMember]]:
    """Returns the slowest stage, replica, rank, micro-batch and link, the worst first.

    A kind in which none is clearly slower than its peers is left out.

    Returns:
        Each straggler, with a test of which operations belong to it.
    """
    timed = _time_operations(steps)
    computed = _relative_times([pair for pair in timed if pair[0].kind not in COMMUNICATIONS])
    moved = _relative_times([pair for pair in timed if pair[0].kind in TRANSFERS])
    several = len({op.replica for op, _ in computed}) > 1
    cells = _median_by_key(computed, lambda op: (op.replica, op.stage, op.micro_batch))
    of_micro_batch = _common_ratios(cells, lambda cell: cell[2])
    ranks = _median_by_key(computed, lambda op: op.rank)
    of_stage = _common_ratios(ranks, lambda rank: rank[1])
    of_replica = _common_ratios(ranks, lambda rank: rank[0]) if several else {}
    # What its stage and its replica do not explain of a rank.
    residuals = {
        (replica, stage): ratio / max(of_stage[stage], of_replica.get(replica, 1.0), 1.0)
        for (replica, stage), ratio in ranks.items()
        if several
    }
    of_link = _median_by_key(moved, _link_of)
    suspects = [
        *_find_worst("stage", of_stage, lambda op: op.stage, "stage {}"),
        *_find_worst("replica", of_replica, lambda op: op.replica, "replica {}"),
        *_find_worst("rank", residuals, lambda op: op.rank, "stage {1} of replica {0}"),
        *_find_worst("micro-batch", of_micro_batch, lambda op: op.micro_batch, "micro-batch {}"),
        *_find_worst("link", of_link, _link_of, "stages {1} and {2} of replica {0}"),
    ]
    return sorted(suspects, key=lambda suspect: -suspect[0].factor)


def _time_operations(steps: Sequence[ReplayedStep]) -> list[TimedOperation]:
    """Returns all operations of a trace, each with its seconds without waits."""
    return [
        (op, float(seconds))
        for step in steps
        for op, seconds in zip(step.operations, step.times_without_waits)
    ]


def _relative_times(timed: Sequence[TimedOperation]) -> list[TimedOperation]:
    """Returns each operation, with its time over the median of its kind."""
    medians = _median_by_key(timed, lambda op: op.kind)
    return [(op, time / medians[op.kind] if medians[op.kind] > 0 else 1.0) for op, time in timed]


def _median_by_key(
    values: Iterable[TimedOperation], key: Callable[[TracedOperation], Key]
) -> dict[Key, float]:
    """Returns the median of the values of all operations with the same key."""
    grouped = _group_by_key((key(op), value) for op, value in values)
    return {name: float(np.median(group)) for name, group in grouped.items()}


def _group_by_key(values: Iterable[tuple[Key, float]]) -> dict[Key, list[float]]:
    """Returns the values of each key."""
    grouped: defaultdict[Key, list[float]] = defaultdict(list)
    for name, value in values:
        grouped[name].append(value)
    return grouped


def _common_ratios(ratios: Mapping[Cell, float], key: Callable[[Cell], Key]) -> dict[Key, float]:
    """Returns how slow each group of ranks is: the median of their ratios.

    A group of which some member is much less slow counts as not slow: its ratio is 1 at most.

    Args:
        ratios: The relative times by cell: a rank, or a rank and a micro-batch.
        key: Returns the group of a cell.
    """
    common = {}
    for name, group in _group_by_key((key(cell), ratio) for cell, ratio in ratios.items()).items():
        median = float(np.median(group))
        all_slow = min(group) - 1 > (median - 1) / 2
        common[name] = median if all_slow else min(median, 1.0)
    return common


def _link_of(op: TracedOperation) -> tuple[int, ...]:
    """Returns the replica of a transfer and the two stages that it connects, in order."""
    down = op.kind in ("forward-send", "backward-recv")
    peer = op.stage + (1 if down else -1)
    return (op.replica, *sorted((op.stage, peer)))


def _find_worst(
    kind: str, factors: Mapping[Any, float], key: Callable[[TracedOperation], object], name: str
) -> list[tuple[Cause, IsMember]]:
    """Returns the slowest straggler of a kind, with a test of which operations belong to it.

    The result is empty if the slowest is hardly slower than the others.

    Args:
        kind: The field ``kind`` of the :class:`Cause`.
        factors: How many times as long each takes, by its number, rank or link.
        key: Returns the number, rank or link of an operation.
        name: The name in words, with fields for what is in such a key, as for ``str.format``.
    """
    if len(factors) < 2:
        return []
    worst = max(factors, key=lambda suspect: factors[suspect])
    peers = [factor for suspect, factor in factors.items() if suspect != worst]
    factor = factors[worst] / float(np.median(peers))
    if factor < LEAST:
        return []
    words = worst if isinstance(worst, tuple) else (worst,)
    transfers = kind == "link"

    def is_member(op: TracedOperation) -> bool:
        return (op.kind in TRANSFERS) == transfers and key(op) == worst

    return [(Cause(kind, name.format(*words), factor), is_member)]


class Slowdown(NamedTuple):
    """The result of replaying a trace.

    Attributes:
        slowdown: S: the mean replayed step over the mean ideal step.
        last_stage: M_S: the fraction of the lost time that is due to the last stage.
        slowest_ranks: M_W: the fraction that is due to the slowest 3 % of the ranks, at least one
            rank.
        step_times: Seconds of each step: in the trace, replayed, ideal.
        ranks: How slow each rank is, by (replica, stage).
        links: The fraction that is due to all communications.
        causes: The likeliest straggler of each kind, the greatest factor first; none within noise.
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
            "steps": [dict(zip(("measured", "replayed", "ideal"), op)) for op in self.step_times],
            "ranks": [
                {"replica": replica, "stage": stage, "score": score}
                for (replica, stage), score in self.ranks.items()
            ],
            "links": self.links,
            "causes": [cause._asdict() for cause in self.causes],
        }


def slowdown_of(steps: Sequence[ReplayedStep]) -> Slowdown:
    """Computes what stragglers cost: replays a trace as it is, and with each straggler made ideal.

    Raises:
        ConfigError: No operation took any time.
    """
    operations = [op for step in steps for op in step.operations]
    if not any(op.duration for op in operations):
        fix = "trace with a finer clock, in seconds"
        raise ConfigError("no operation of the trace took any time", fix=fix)
    ideal = ideal_times(steps)
    stages = sorted({op.stage for op in operations})
    replicas = sorted({op.replica for op in operations})
    suspects = find_suspects(steps)
    cases: dict[object, IsMember] = {
        "none": lambda op: False,
        "all": lambda op: True,
        "links": lambda op: op.kind in COMMUNICATIONS,
        **{("stage", stage): _has_value("stage", stage) for stage in stages},
        **{("replica", replica): _has_value("replica", replica) for replica in replicas},
        **dict(suspects),
    }
    times = _replay_cases(steps, ideal, list(cases.values()))
    mean_time = dict(zip(cases, times.mean(axis=0)))
    replayed, best = mean_time["none"], mean_time["all"]

    def share(time: float) -> float:
        """Returns the fraction of the lost time that is gained if a mean step takes ``time``."""
        lost = replayed - best
        return float((replayed - time) / lost) if lost > 1e-9 * replayed else 0.0

    shares = {name: share(time) for name, time in mean_time.items()}
    scores = {
        (replica, stage): min(shares["replica", replica], shares["stage", stage])
        for replica in replicas
        for stage in stages
    }
    slowest = sorted(scores, key=lambda rank: -scores[rank])[: max(1, int(SLOWEST * len(scores)))]
    without_slowest = _replay_cases(steps, ideal, [lambda op: op.rank in slowest]).mean()
    return Slowdown(
        float(replayed / best) if best else 1.0,
        shares["stage", stages[-1]],
        share(without_slowest),
        tuple((step.span, row[0], row[1]) for step, row in zip(steps, times.tolist())),
        scores,
        shares["links"],
        tuple(cause._replace(share=shares[cause]) for cause, _ in suspects),
    )


def _has_value(field: str, value: int) -> IsMember:
    """Returns a test of whether a field of an operation has a value."""
    return lambda op: bool(getattr(op, field) == value)


def ideal_times(steps: Sequence[ReplayedStep]) -> dict[str, float]:
    """Returns the mean time of each kind of computation and the median of each communication."""
    by_kind = _group_by_key((op.kind, seconds) for op, seconds in _time_operations(steps))
    return {
        kind: float(np.median(values) if kind in COMMUNICATIONS else np.mean(values))
        for kind, values in by_kind.items()
    }


def _replay_cases(
    steps: Sequence[ReplayedStep], ideal: Mapping[str, float], members: Sequence[IsMember]
) -> np.ndarray:
    """Replays each step in several cases, in each of which some operations take their ideal time.

    Args:
        steps: The steps of the trace.
        ideal: The ideal seconds by kind of operation.
        members: For each case a test of which operations take their ideal time.

    Returns:
        [steps, cases]: the seconds of each step.
    """
    rows = []
    for step in steps:
        chosen = np.array([[member(op) for member in members] for op in step.operations])
        best = np.array([ideal[op.kind] for op in step.operations])
        durations = np.where(chosen, best[:, None], step.times_without_waits[:, None])
        rows.append(step.ends(durations).max(axis=0))
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
    """Simulates other schedules with the mean costs of a trace's stages.

    Returns:
        The schedules, the fastest first; none for a trace with several model parts on a rank, fused
        actions, slices, or a rank that computed nothing.
    """
    timed = _time_operations(steps)
    computed = [pair for pair in timed if pair[0].kind not in COMMUNICATIONS]
    for op, _ in computed:
        sliced = isinstance(op.micro_batch, SliceNumber)
        if sliced or op.part != op.stage or "|" in op.kind:
            return []
    times = _group_by_key(((op.kind, op.stage), seconds) for op, seconds in computed)
    ranks = len({stage for _, stage in times})
    if any(stage >= ranks for _, stage in times):
        return []
    micro_batches = len({op.micro_batch for op, _ in timed})
    mean = {key: float(np.mean(values)) for key, values in times.items()}
    forward = [mean.get(("F", stage), 0.0) for stage in range(ranks)]
    whole = [mean.get(("B", stage), 0.0) for stage in range(ranks)]
    input_grad = [mean.get(("I", stage), whole[stage] / 2) for stage in range(ranks)]
    weight_grad = [mean.get(("W", stage), whole[stage] / 2) for stage in range(ranks)]
    transfers = [seconds for op, seconds in timed if op.kind in TRANSFERS]
    comm = float(np.median(transfers)) if transfers else 0.0

    def step_time(name: str, costs: Sequence[Sequence[float]]) -> float:
        """Returns the seconds of a step under a schedule with these costs of F, I and W."""
        schedule = build(name, ranks=ranks, micro_batches=micro_batches)
        forward, input_grad, weight_grad = map(tuple, costs)
        measured = Costs(forward, input_grad, weight_grad, comm=comm)
        return float(schedule.simulate(measured).makespan)

    costs = (forward, input_grad, weight_grad)
    even = [[float(np.mean(part))] * ranks for part in costs]
    simulated = [Alternative(name, step_time(name, costs), step_time(name, even)) for name in NAMES]
    return sorted(simulated, key=lambda op: op.seconds)
