"""Finds what limits a step: how much faster it would be with a better part of the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.estimate import StepEstimate, TrainingJob
from fleetpipe.contrib.clusters.layout import JobLayout
from fleetpipe.profiling.cost_model import Link

#: As good as without end of a resource; and 10 % more of it.
_ENDLESS, _MORE = 1e9, 1.1


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


#: How a cluster looks with so many times as much of a resource.
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
