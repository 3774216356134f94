"""Finds the fastest layouts of a job, and which resources of the cluster limit a layout.

A lower bound of each layout takes microseconds. Pipelines are simulated in the order of their
bounds, until the next bound is above the slowest of the wanted layouts. Start with ``search``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_TRIED_CHUNKS = (2, 4, 8)

#: The most ranks of a pipeline that are tried, unless ``--only pp=`` names others.
_MOST_PIPELINE_RANKS = 128

#: The most layouts above the memory that are simulated to find ``FastestLayouts.lacking``.
_MOST_LACKING = 20
#: A layout that needs more than this multiple of a device's memory is left out altogether.
_MOST_OVERFLOW = 4

#: A sequence is split over no more ranks than leave each so many tokens, unless ``--only cp=``
#: names other degrees.
_LEAST_TOKENS = 8192


#: The values that are tried, by the names of ``--only``; an empty tuple stands for all that fit.
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

#: The factors by which a resource is multiplied: practically without limit, and 10 % more of it.
_UNLIMITED, _MORE = 1e9, 1.1


class FastestLayouts(NamedTuple):
    """The result of a search.

    Attributes:
        best: The fastest layouts that fit into memory, the fastest first.
        layouts: Number of all layouts.
        played: Number of layouts that were simulated.
        lacking: The layout with the least memory among those that are faster than the best but need
            too much memory; None if there is none.
    """

    best: tuple[StepEstimate, ...]
    layouts: int
    played: int
    lacking: StepEstimate | None


class _Bound(NamedTuple):
    """Lower bounds of the seconds of a step and of the bytes of a rank under a layout."""

    seconds: float
    size: float
    layout: JobLayout


def search(job: TrainingJob, only: Mapping[str, tuple[Any, ...]], top: int = 10) -> FastestLayouts:
    """Returns the fastest layouts of a job that fit into memory.

    Args:
        job: The model and the cluster.
        only: By field of a layout, the values to try instead of those in :data:`CHOICES`.
        top: The wanted number of layouts.

    Raises:
        ConfigError: No layout fits.
    """
    bounds = []
    for layout in layouts(job, {**CHOICES, **only}):
        least = job.least(layout)
        if least is not None:
            bounds.append(_Bound(*least, layout))
    bounds.sort(key=lambda bound: (bound.seconds, bound.size))
    device_bytes = job.cluster.memory
    # Both lists are sorted: by seconds, and by bytes; at equal ones by the order of the bounds.
    best: list[tuple[float, int, StepEstimate]] = []
    lacking: list[tuple[float, int, JobLayout]] = []
    for number, (seconds, size, layout) in enumerate(bounds):
        if len(best) >= top and seconds > best[top - 1][0]:
            break
        memory = job.memory(layout) if size <= _MOST_OVERFLOW * device_bytes else None
        peak = max(rank.total for rank in memory) if memory else 0.0
        if peak > device_bytes:
            insort(lacking, (peak, number, layout))
        elif memory is not None and (estimate := job.estimate(layout)):
            insort(best, (estimate.seconds, number, estimate))
    if not best:
        _require_divisors(job.cluster.ranks, only)
        _raise_no_layout(device_bytes, bounds, lacking[0][0] if lacking else None)
    fastest = tuple(estimate for _, _, estimate in best[:top])
    larger = (job.estimate(layout) for _, _, layout in lacking[:_MOST_LACKING])
    faster = next((e for e in larger if e is not None and e.seconds < fastest[0].seconds), None)
    return FastestLayouts(fastest, len(bounds), len(best), faster)


def _require_divisors(ranks: int, only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError if no degree that ``--only`` allows for an axis divides the ranks."""
    for name in ("pp", "tp", "cp"):
        degrees = only.get(name, ())
        if degrees and all(ranks % degree for degree in degrees):
            raise ConfigError(
                f"there is no layout: the cluster has {ranks} devices",
                expected=f"{name} that divides {ranks}",
                got=f"{name}={','.join(map(str, degrees))}",
                fix="give another --only or --ranks, or a cluster of more devices",
            )


def _raise_no_layout(
    device_bytes: float, bounds: Sequence[_Bound], needed: float | None
) -> NoReturn:
    """Raises the error that no layout fits into ``device_bytes``.

    ``bounds`` are those of all layouts; ``needed`` is the least bytes that a simulated layout
    needs, None if none was simulated.
    """
    if needed is None:
        needed = min((bound.size for bound in bounds), default=0.0)
    raise ConfigError(
        "no layout fits into the memory of a device" if bounds else "there is no layout",
        expected=f"at most {show_bytes(device_bytes)}"
        if bounds
        else "degrees that split the ranks, the model and the batch: it is a multiple of replicas"
        " times micro-batch",
        got=f"{show_bytes(needed)} or more" if bounds else None,
        fix="use more hosts, a smaller micro-batch, recompute, or --only sharding-stage=3"
        if bounds
        else "give another --batch, or fewer of --only",
    )


def layouts(job: TrainingJob, only: Mapping[str, tuple[Any, ...]]) -> Iterator[JobLayout]:
    """Yields the layouts that use all ranks and whose degrees fit the model and the hosts."""
    ranks, model = job.cluster.ranks, job.model
    tensors = only["tp"] or _powers_of_two(job.cluster.devices)
    contexts = only["cp"] or _powers_of_two(max(getattr(model, "sequence", 1) // _LEAST_TOKENS, 1))
    experts = only["ep"] or _powers_of_two(max(getattr(model, "experts", 0), 1))
    pipelines = only["pp"] or range(1, min(ranks, _MOST_PIPELINE_RANKS) + 1)
    for pipeline, tensor, context in product(pipelines, tensors, contexts):
        replicas, left_over = divmod(ranks, tensor * context * pipeline)
        if left_over:
            continue
        for sharding_stage, expert, micro_batch, recompute in product(
            only["sharding-stage"], experts, only["micro-batch"], only["recompute"]
        ):
            layers = JobLayout(
                *(1, tensor, 1, 1, context, expert), micro_batch=micro_batch, recompute=recompute
            )
            if job.batch % (replicas * micro_batch) or replicas % expert:
                continue
            if not model.fits(layers):
                continue
            for sharding in {replicas} if sharding_stage > 1 else {1, replicas}:
                degrees = (pipeline, tensor, replicas // sharding, sharding, context, expert)
                for name, chunks in _schedules_with_chunks(only["schedule"], pipeline):
                    yield JobLayout(*degrees, name, chunks, micro_batch, recompute, sharding_stage)


def _schedules_with_chunks(names: tuple[str, ...], ranks: int) -> Iterator[tuple[str, int]]:
    """Yields each schedule to try on a pipeline of ``ranks`` ranks, with each number of chunks.

    Without ``names`` FThenB is left out, which is never better than 1F1B.
    """
    if ranks == 1:
        yield "1F1B", 1
        return
    for name, family in FAMILIES.items():
        if name in names or (not names and name != "FThenB" and not family.sliced):
            several = family.chunks > 1 and family.most_chunks is None
            yield from (
                (name, chunks) for chunks in (_TRIED_CHUNKS if several else (family.chunks,))
            )


def _powers_of_two(largest: int) -> tuple[int, ...]:
    """Returns the powers of two up to ``largest``, from 1 on."""
    return tuple(1 << power for power in range(largest.bit_length()))


class ResourceLimit(NamedTuple):
    """The time that a resource costs a step.

    Attributes:
        resource: The resource's name.
        seconds: Time that an unlimited amount of the resource would save in a step; 0 if that has
            no meaning.
        gain: The fraction of additional work in the same time with 10 % more of the resource; for
            sequences and hosts, with twice as many.
    """

    resource: str
    seconds: float
    gain: float


def limits(job: TrainingJob, best: StepEstimate) -> tuple[ResourceLimit, ...]:
    """Returns the time that each resource costs a step, the costliest first.

    Args:
        job: The job.
        best: The estimate of the layout whose limits are wanted.
    """

    def step_seconds(changed: TrainingJob, layout: JobLayout = best.layout) -> float:
        estimate = changed.estimate(layout)
        return math.inf if estimate is None else estimate.seconds

    rows = []
    for resource, with_more in _RESOURCES.items():
        unlimited, more = (
            step_seconds(replace(job, cluster=with_more(job.cluster, factor)))
            for factor in (_UNLIMITED, _MORE)
        )
        rows.append(ResourceLimit(resource, best.seconds - unlimited, best.seconds / more - 1))
    rows.sort(key=lambda row: -row.seconds)
    longer = step_seconds(replace(job, batch=2 * job.batch))
    rows.append(ResourceLimit("waiting (bubble)", best.bubble, 2 * best.seconds / longer - 1))
    hosts = replace(job.cluster, hosts=2 * job.cluster.hosts)
    axis = "sharding" if best.layout.sharding > 1 else "data"
    wider = best.layout._replace(**{axis: 2 * getattr(best.layout, axis)})
    gain = best.seconds / step_seconds(replace(job, cluster=hosts), wider) - 1
    return (*rows, *([ResourceLimit("hosts", 0.0, gain)] if gain > -1 else []))


def _multiply_bandwidth(link: Link, factor: float) -> Link:
    return Link(link.latency, link.per_byte / factor)


def _divide_latency(link: Link, factor: float) -> Link:
    return Link(link.latency / factor, link.per_byte)


#: By resource a function of a cluster and a factor; it returns the cluster with so much more of it.
_RESOURCES: dict[str, Callable[[Cluster, float], Cluster]] = {
    "FLOP/s of products": Cluster.with_flops,
    "bandwidth of memory": lambda cluster, factor: replace(
        cluster, memory_bandwidth=cluster.memory_bandwidth * factor
    ),
    "bandwidth inside a host": lambda cluster, factor: replace(
        cluster, inside=_multiply_bandwidth(cluster.inside, factor)
    ),
    "bandwidth between hosts": lambda cluster, factor: replace(
        cluster, between=_multiply_bandwidth(cluster.between, factor)
    ),
    "latency of links": lambda cluster, factor: replace(
        cluster,
        inside=_divide_latency(cluster.inside, factor),
        between=_divide_latency(cluster.between, factor),
    ),
}
