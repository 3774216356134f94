"""Describes a cluster, with its devices and links (``Cluster``), and how a job is split on it.

A ``JobLayout`` has the degrees of a job, the schedule, and the micro-batch size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError, nearest
from fleetpipe.json_value import JsonValue, Source, read
from fleetpipe.profiling.cost_model import Link
from fleetpipe.profiling.memory import read_bytes

#: Pairs of the size of a matrix product, the cube root of its multiplications, and its FLOP/s.
Curve = tuple[tuple[float, float], ...]

#: Ranks that exchange values: how many, and by how much the numbers that two successive ones of
#: them have in the job differ, the distance. (4, 8) are ranks 0, 8, 16 and 24, for example.
Group = tuple[int, int]

#: The algorithms of an all-reduce.
ALL_REDUCES = ("ring", "tree")

_SOURCE = Source(
    "this describes no cluster",
    ConfigError,
    "write hosts, devices, memory, memory_bandwidth, flops, peak, inside and between, as"
    " docs/estimate.md shows",
)


@dataclass(frozen=True)
class Cluster:
    """The hosts and devices that a job runs on. Immutable.

    Attributes:
        hosts: Number of hosts.
        devices: Devices on each host.
        memory: Bytes of a device.
        memory_bandwidth: Sustained bytes per second that a device reads and writes.
        flops: Sustained FLOP/s of a product by dtype, as a curve over its size; one point is a
            constant.
        peak: FLOP/s that count as a utilisation of 100 %.
        inside: Link between devices of one host: latency in seconds, and seconds for each byte.
        between: Link of one device to another host, in the same units.
        all_reduce: "ring" or "tree".
        overlapped_transfers: The fraction of a transfer between stages during which ranks compute.
        overlapped_gradients: The fraction of the exchange of gradients during which ranks compute.
        profiled: FLOP/s of the machine that a profile was measured on.
    """

    hosts: int
    devices: int
    memory: float
    memory_bandwidth: float
    flops: dict[str, Curve] = field(hash=False)
    peak: float
    inside: Link
    between: Link
    all_reduce: str = "ring"
    overlapped_transfers: float = 1.0
    overlapped_gradients: float = 0.0
    profiled: float | None = None

    @property
    def ranks(self) -> int:
        """Number of all devices."""
        return self.hosts * self.devices

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Reads a cluster from a .toml or JSON file.

        Raises:
            ConfigError: It cannot be read, or a figure is missing, unknown or impossible.
        """
        return read(path, _SOURCE, _read_cluster)

    def with_flops(self, factor: float) -> Cluster:
        """Returns this cluster with products that run ``factor`` times as fast."""
        flops = {
            dtype: tuple((size, speed * factor) for size, speed in curve)
            for dtype, curve in self.flops.items()
        }
        return replace(self, flops=flops)

    def product(self, dtype: str, rows: float, columns: float, inner: float) -> float:
        """Returns the seconds of the product of matrices [rows, inner] and [inner, columns].

        Raises:
            ConfigError: The cluster has no speed for that dtype.
        """
        curve = self.flops.get(dtype)
        if curve is None:
            raise ConfigError(
                f"the cluster does not say how fast a product in {dtype} is",
                expected=f"one of {', '.join(self.flops)}: {nearest(dtype, list(self.flops))}",
                fix=f"add {dtype} to its flops, or choose another dtype for the model",
            )
        multiplications = rows * columns * inner
        return 2 * multiplications / _interpolate(curve, multiplications ** (1 / 3))

    def traffic(self, size: float) -> float:
        """Returns the seconds in which a device reads and writes ``size`` bytes."""
        return size / self.memory_bandwidth

    def link(self, distance: int) -> Link:
        """Returns the link between two ranks whose numbers in the job differ by ``distance``."""
        return self.inside if distance < self.devices else self.between

    def gather(self, size: float, group: Group, messages: int = 1) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter of ``size`` bytes.

        Between hosts, the members on a host share the work, as each has a link.

        Args:
            size: Bytes that each member has at the end.
            group: The ranks that take part, its members.
            messages: The number of successive gathers into which the bytes are split.
        """
        ranks, _ = group
        if ranks == 1 or not size:
            return 0.0
        link, steps = self._bottleneck(group), ranks - 1
        rounds = steps if self.all_reduce == "ring" else math.ceil(math.log2(ranks))
        # A member receives all bytes but its own.
        return messages * rounds * link.latency + steps / ranks * size * link.per_byte

    def reduce(self, size: float, group: Group) -> float:
        """Returns the seconds of an all-reduce of ``size`` bytes.

        An all-reduce is a reduce-scatter and an all-gather.
        """
        return 2 * self.gather(size, group)

    def exchange(self, size: float, group: Group) -> float:
        """Returns the seconds of an all-to-all in which each member sends ``size`` bytes."""
        ranks, _ = group
        if ranks == 1 or not size:
            return 0.0
        # Each member gets the same part of the bytes; the sender's own part stays where it is.
        members = self._members_on_a_host(group)
        to_other_hosts = size * ((ranks - members) / ranks)
        within_host = size * ((members - 1) / ranks)
        return self.between.seconds(to_other_hosts) + self.inside.seconds(within_host)

    def _members_on_a_host(self, group: Group) -> int:
        """Returns the number of members of a group on one host."""
        ranks, distance = group
        return max(1, min(ranks, self.devices // distance))

    def _bottleneck(self, group: Group) -> Link:
        """Returns the slowest link of a ring through the members of a group.

        Between two hosts, the bytes are shared out over the links of all members on a host.
        """
        members, (ranks, _) = self._members_on_a_host(group), group
        if members == ranks:
            return self.inside
        slowest = max(self.inside.per_byte, self.between.per_byte / members)
        return Link(self.between.latency, slowest)


def _interpolate(curve: Curve, size: float) -> float:
    """Returns a product's FLOP/s, linear between points in logarithms, constant beyond the ends.

    ``size``, the unit of the curve, is the cube root of the number of multiplications.
    """
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, first), (high, second) in itertools.pairwise(curve):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(first * (second / first) ** share)
    return curve[-1][1]


def _read_cluster(content: JsonValue) -> Cluster:
    """Reads a cluster from the content of its file, and compares its figures with each other."""
    cluster = content.record(Cluster, _read_rate, **_READERS)
    fastest = max(speed for curve in cluster.flops.values() for _, speed in curve)
    if cluster.peak < fastest:
        raise content["peak"].refused(f"{fastest:g} or more, as products sustain that")
    return cluster


def _read_curves(value: JsonValue) -> dict[str, Curve]:
    curves = {dtype: _read_curve(curve) for dtype, curve in value.fields().items()}
    if not curves:
        raise value.refused("FLOP/s of at least one dtype")
    return curves


def _read_curve(value: JsonValue) -> Curve:
    """Reads FLOP/s: one number, or a list of pairs of a size and FLOP/s."""
    if not isinstance(value.content, list):
        return ((1.0, _read_rate(value)),)
    points = [tuple(map(_read_rate, point.items())) for point in value.items()]
    sizes = [point[0] for point in points if len(point) == 2]
    if not points or len(sizes) < len(points) or sizes != sorted(set(sizes)):
        raise value.refused("pairs of a size and FLOP/s, sizes rising")
    return tuple((size, speed) for size, speed in points)


def _read_link(value: JsonValue) -> Link:
    value.require_names(["latency", "bandwidth"])
    return Link(value["latency"].figure(), 1 / _read_size(value["bandwidth"]))


def _read_positive(value: JsonValue) -> int:
    if not value.count():
        raise value.refused("a whole number of 1 or more")
    return value.count()


def _read_rate(value: JsonValue) -> float:
    if not value.figure():
        raise value.refused("a number above 0")
    return float(value.figure())


def _read_size(value: JsonValue) -> float:
    try:
        return read_bytes(value.content)
    except ConfigError:
        raise value.refused('a number above 0, or a size such as "80GB"') from None


def _read_share(value: JsonValue) -> float:
    if value.figure() > 1:
        raise value.refused("a share, 0 to 1")
    return float(value.figure())


def _read_all_reduce(value: JsonValue) -> str:
    if value.content not in ALL_REDUCES:
        raise value.refused(" or ".join(ALL_REDUCES))
    return value.text()


#: The functions that read a field of a cluster; the other fields are rates.
_READERS: dict[str, Callable[[JsonValue], Any]] = {
    "hosts": _read_positive,
    "devices": _read_positive,
    "memory": _read_size,
    "memory_bandwidth": _read_size,
    "flops": _read_curves,
    "inside": _read_link,
    "between": _read_link,
    "all_reduce": _read_all_reduce,
    "overlapped_transfers": _read_share,
    "overlapped_gradients": _read_share,
}


class JobLayout(NamedTuple):
    """The split of a job among ranks.

    The order of the axes is Fleet's, from the innermost: tensor, context, sharding, pipeline, data.
    The numbers of successive ranks along an axis differ by the product of the degrees before it.

    Attributes:
        pipeline: Ranks of a pipeline.
        tensor: Ranks among which each weight is split.
        data: Replicas that each store the whole optimizer state.
        sharding: Replicas among which the optimizer's state is split.
        context: Ranks among which each sequence is split.
        expert: Ranks among which the experts are distributed. These are ranks of different
            replicas, so that this adds no ranks to the job.
        schedule: The schedule's name.
        chunks: Chunks on each rank.
        micro_batch: Sequences of a micro-batch.
        recompute: "none", "selective" or "full".
        sharding_stage: 1 splits the optimizer's state, 2 gradients too, 3 parameters too.
        sequence_parallel: Whether the ranks of ``tensor`` split norms and residuals too.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    sharding: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    sharding_stage: int = 1
    sequence_parallel: bool = True

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.pipeline * self.tensor * self.context * self.replicas

    @property
    def replicas(self) -> int:
        """Number of pipelines, each with its own data."""
        return self.data * self.sharding

    @property
    def of_layers(self) -> JobLayout:
        """The layout reduced to the fields on which layers' costs depend."""
        return JobLayout(
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def shards(self) -> Group:
        """The ranks among which the optimizer's state is split: how many, and their distance."""
        return (self.sharding, self.tensor * self.context)

    @property
    def copies(self) -> Group:
        """The ranks with the same parameters and optimizer shard: how many, and their distance."""
        return (self.data, self.tensor * self.context * self.sharding * self.pipeline)

    @property
    def neighbour(self) -> int:
        """The distance between the rank numbers of neighbours in a pipeline."""
        return self.tensor * self.context * self.sharding

    def micro_batches(self, batch: int) -> int:
        """Returns the micro-batches of a batch; 0 if the batch cannot be divided so.

        Args:
            batch: Sequences that all replicas train on in a step.
        """
        count, rest = divmod(batch, self.replicas * self.micro_batch)
        return 0 if rest else count

    def __str__(self) -> str:
        degrees = {
            "pp": self.pipeline,
            "tp": self.tensor,
            "cp": self.context,
            "ep": self.expert,
            "dp": self.data,
            "sharding": self.sharding,
        }
        return " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1"
