"""Finds the fastest layouts of a job, and which resources of the cluster limit a layout.

A lower bound of each layout takes microseconds. Pipelines are simulated in the order of their
bounds, until the next bound is above the slowest of the wanted layouts. Start with ``search``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, NoReturn

from fleetpipe.contrib.clusters import StepEstimate, TrainingJob
from fleetpipe.contrib.clusters.cluster import Cluster, JobLayout
from fleetpipe.contrib.clusters.workload import RECOMPUTES
from fleetpipe.errors import ConfigError
from fleetpipe.profiling.cost_model import Link
from fleetpipe.profiling.memory import show_bytes
from fleetpipe.schedules.families.table import FAMILIES

#: The numbers of chunks that are tried for a schedule that takes any number.
_CHUNKS = (2, 4, 8)

#: The most ranks of a pipeline that are tried, unless ``--only pp=`` names others.
_MOST_RANKS = 128

#: The number of layouts above the memory that are simulated; one of four times the memory is not.
_LACKING, _MUCH = 20, 4

#: The least tokens of a sequence for each rank that shares it, unless ``--only cp=`` names others.
_TOKENS = 8192


#: The values that are tried, by the names of ``--only``; an empty tuple: all that make sense.
CHOICES: dict[str, tuple[Any, ...]] = {
    "pp": (),
    "tp": (),
    "cp": (),
    "ep": (),
    "schedule": (),
    "micro-batch": (1, 2, 4, 8),
    "recompute": RECOMPUTES,
    "sharding-stage": (1,),
}

#: The factors for a practically unlimited resource, and for 10 % more of it.
_ENDLESS, _MORE = 1e9, 1.1


class FastestLayouts(NamedTuple):
    """The result of a search.

    Attributes:
        best: The fastest layouts that fit, the fastest first.
        layouts: Number of all layouts.
        played: Number of simulated layouts.
        lacking: A layout that is faster than the best but does not fit, by the least memory; or
            None.
    """

    best: tuple[StepEstimate, ...]
    layouts: int
    played: int
    lacking: StepEstimate | None


def search(job: TrainingJob, only: Mapping[str, tuple[Any, ...]], top: int = 10) -> FastestLayouts:
    """Returns the fastest layouts of a job that fit into memory.

    Args:
        job: The model and the cluster.
        only: Values to try instead of those in :data:`CHOICES`.
        top: The wanted number of layouts.

    Raises:
        ConfigError: No layout fits.
    """
    bounds: list[tuple[float, float, JobLayout]] = []
    for layout in layouts(job, {**CHOICES, **only}):
        least = job.least(layout)
        if least is not None:
            bounds.append((*least, layout))
    bounds.sort(key=lambda bound: bound[:2])
    most = job.cluster.memory
    best: list[tuple[float, int, StepEstimate]] = []
    lacking: list[tuple[float, int, JobLayout]] = []
    for number, (seconds, kept, layout) in enumerate(bounds):
        if len(best) >= top and seconds > best[top - 1][0]:
            break
        memory = job.memory(layout) if kept <= _MUCH * most else None
        peak = max(rank.total for rank in memory) if memory else 0.0
        if peak > most:
            insort(lacking, (peak, number, layout))
        elif memory is not None and (made := job.estimate(layout)):
            insort(best, (made.seconds, number, made))
    if not best:
        _require_divisors(job.cluster.ranks, only)
        _refuse(most, bounds, lacking)
    larger = (job.estimate(layout) for _, _, layout in lacking[:_LACKING])
    faster = next((made for made in larger if made and made.seconds < best[0][0]), None)
    return FastestLayouts(tuple(made for _, _, made in best[:top]), len(bounds), len(best), faster)


def _require_divisors(ranks: int, only: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses degrees of which none divides the ranks of a cluster."""
    for name in ("pp", "tp", "cp"):
        degrees = only.get(name, ())
        if degrees and all(ranks % degree for degree in degrees):
            raise ConfigError(
                f"there is no layout: the cluster has {ranks} devices",
                expected=f"{name} that divides {ranks}",
                got=f"{name}={','.join(map(str, degrees))}",
                fix="give another --only or --ranks, or a cluster of more devices",
            )


def _refuse(
    most: float,
    bounds: list[tuple[float, float, JobLayout]],
    lacking: list[tuple[float, int, JobLayout]],
) -> NoReturn:
    """Raises the error that no layout fits."""
    least = min((kept for _, kept, _ in bounds), default=0.0)
    raise ConfigError(
        "no layout fits into the memory of a device" if bounds else "there is no layout",
        expected=f"at most {show_bytes(most)}"
        if bounds
        else "degrees that split the ranks, the model and the batch: it is a multiple of replicas"
        " times micro-batch",
        got=f"{show_bytes(lacking[0][0] if lacking else least)} or more" if bounds else None,
        fix="use more hosts, a smaller micro-batch, recompute, or --only sharding-stage=3"
        if bounds
        else "give another --batch, or fewer of --only",
    )


def layouts(job: TrainingJob, only: Mapping[str, tuple[Any, ...]]) -> Iterator[JobLayout]:
    """Yields the layouts that use all ranks and whose degrees fit the model and the hosts."""
    ranks, model = job.cluster.ranks, job.model
    tensors = only["tp"] or _powers(job.cluster.devices)
    contexts = only["cp"] or _powers(max(getattr(model, "sequence", 1) // _TOKENS, 1))
    experts = only["ep"] or _powers(max(getattr(model, "experts", 0), 1))
    parts = only["pp"] or range(1, min(ranks, _MOST_RANKS) + 1)
    for pipeline, tensor, context in product(parts, tensors, contexts):
        replicas, rest = divmod(ranks, tensor * context * pipeline)
        if rest:
            continue
        for stage, expert, micro_batch, recompute in product(
            only["sharding-stage"], experts, only["micro-batch"], only["recompute"]
        ):
            layers = JobLayout(
                *(1, tensor, 1, 1, context, expert), micro_batch=micro_batch, recompute=recompute
            )
            whole = job.batch % (replicas * micro_batch) == 0
            if not whole or replicas % expert or not model.fits(layers):
                continue
            for sharding in {replicas} if stage > 1 else {1, replicas}:
                degrees = (pipeline, tensor, replicas // sharding, sharding, context, expert)
                for name, chunks in _schedules(only["schedule"], pipeline):
                    yield JobLayout(*degrees, name, chunks, micro_batch, recompute, stage)


def _schedules(names: tuple[str, ...], parts: int) -> Iterator[tuple[str, int]]:
    """Yields schedules with their chunks; FThenB, never better than 1F1B, only if named."""
    if parts == 1:
        yield "1F1B", 1
        return
    for name, family in FAMILIES.items():
        if name in names or (not names and name != "FThenB" and not family.sliced):
            several = family.chunks > 1 and family.most_chunks is None
            yield from ((name, chunks) for chunks in (_CHUNKS if several else (family.chunks,)))


def _powers(most: int) -> tuple[int, ...]:
    """Returns the powers of two up to a number."""
    return tuple(1 << power for power in range(most.bit_length()))


class ResourceLimit(NamedTuple):
    """The time that a resource costs a step.

    Attributes:
        resource: The resource's name.
        seconds: Time that an unlimited amount of it would save in a step; 0 if that has no meaning.
        gain: The share of additional work in the same time with 10 % more of it; for sequences and
            hosts, with twice as many.
    """

    resource: str
    seconds: float
    gain: float


def limits(job: TrainingJob, best: StepEstimate) -> tuple[ResourceLimit, ...]:
    """Returns the time that each resource costs the step of a layout, the costliest first."""

    def seconds(other: TrainingJob, layout: JobLayout = best.layout) -> float:
        made = other.estimate(layout)
        return math.inf if made is None else made.seconds

    rows = []
    for resource, better in _RESOURCES.items():
        endless, more = (
            seconds(replace(job, cluster=better(job.cluster, factor)))
            for factor in (_ENDLESS, _MORE)
        )
        rows.append(ResourceLimit(resource, best.seconds - endless, best.seconds / more - 1))
    rows.sort(key=lambda row: -row.seconds)
    longer = seconds(replace(job, batch=2 * job.batch))
    rows.append(ResourceLimit("waiting (bubble)", best.bubble, 2 * best.seconds / longer - 1))
    hosts = replace(job.cluster, hosts=2 * job.cluster.hosts)
    axis = "sharding" if best.layout.sharding > 1 else "data"
    wider = best.layout._replace(**{axis: 2 * getattr(best.layout, axis)})
    gain = best.seconds / seconds(replace(job, cluster=hosts), wider) - 1
    return (*rows, *([ResourceLimit("hosts", 0.0, gain)] if gain > -1 else []))


def _faster(link: Link, factor: float) -> Link:
    return Link(link.latency, link.per_byte / factor)


def _sooner(link: Link, factor: float) -> Link:
    return Link(link.latency / factor, link.per_byte)


#: By resource the function that returns a cluster with a multiple of it.
_RESOURCES: dict[str, Callable[[Cluster, float], Cluster]] = {
    "FLOP/s of products": Cluster.with_flops,
    "bandwidth of memory": lambda one, factor: replace(
        one, memory_bandwidth=one.memory_bandwidth * factor
    ),
    "bandwidth inside a host": lambda one, factor: replace(one, inside=_faster(one.inside, factor)),
    "bandwidth between hosts": lambda one, factor: replace(
        one, between=_faster(one.between, factor)
    ),
    "latency of links": lambda one, factor: replace(
        one, inside=_sooner(one.inside, factor), between=_sooner(one.between, factor)
    ),
}
