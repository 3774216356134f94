"""The axes along which the ranks of a job are split, and every rank's coordinate on each.

An axis is a field of :class:`Degrees` and of :class:`Coordinate`. Those of ``DENSE`` number the
ranks: their degrees multiply to the size of the job. Those of ``EXPERT`` split the ranks of one
stage of all replicas a second time, as Fleet does for the layers that are experts::

    8 ranks of a stage     dp 2 x sep 2 x mp 2      moe_sharding 2 x ep 4
    their coordinates        (0,0,0) (0,0,1) ..       (0,0) (0,1) (0,2) (0,3) (1,0) ..

Where ranks hold wrong values, the axis along which these ranks lie says a likely cause:
:func:`axis_between` finds it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.mesh import degree_checks

#: The axes that number the ranks, in Paddle's order: numbers change fastest along the last one.
DENSE = ("dp", "pp", "sharding", "sep", "cp", "mp")
#: The axes that split the ranks of a stage again, for experts.
EXPERT = ("moe_sharding", "ep")
#: All axes.
AXES = (*DENSE, *EXPERT)
#: The axes of replicas of the model: the ranks along them take different samples.
REPLICA = ("dp", "sharding")
#: The axes that split sequences: the ranks along them have parts of the same sequences.
SEQUENCE = ("sep", "cp")
#: The axes along which ranks hold the same parameters.
COPIES = (*REPLICA, *SEQUENCE)
#: The axes along which ranks hold shards of the same layers.
SHARDS = ("mp",)

#: For each axis that an order leaves out, the axis before which it is inserted; "" for the end.
_FOLLOWERS = {
    "mp": "",
    "cp": "mp",
    "sep": "cp",
    "sharding": "sep",
    "pp": "sharding",
    "dp": "pp",
    "moe_sharding": "sharding",
    "ep": "mp",
}

#: The likely cause of equal dropout on ranks along an axis, for errors; {} stands for the axis.
STREAMS = "dropout draws the same numbers on ranks along {}, which have different values there"
#: The likely cause of gradients that are clipped by a wrong norm, for errors.
NORM = (
    "the norm is not that of all gradients: parts of other ranks are left out, or what ranks share "
    "is counted more than once"
)


@dataclass(frozen=True)
class Degrees:
    """The number of ranks along each axis.

    Attributes:
        sharding: Ranks that take different samples and share the optimizer's state; if
            ``hybrid_configs`` counts cp within sharding, ``sharding_degree / cp_degree``.
        cp_in_sharding: Whether the ranks along cp share the optimizer's state too and count in
            Fleet's ``sharding_degree``, as they do beside ``ep_degree``.
        dp_open: Whether ``dp_degree`` was -1: as many replicas as the ranks allow.
        asked_pp: The ``pp_degree`` of the script, where a job goes on with fewer stages; else 0.
    """

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    cp: int = 1
    mp: int = 1
    moe_sharding: int = 1
    ep: int = 1
    cp_in_sharding: bool = False
    dp_open: bool = field(default=False, compare=False)
    asked_pp: int = field(default=0, compare=False)

    @classmethod
    def resolve(
        cls, configs: Mapping[str, Any], world_size: int, whole_size: int | None = None
    ) -> Degrees:
        """Reads ``hybrid_configs``, computes the open degrees and checks the products.

        ``dp_degree=-1`` means the ranks that the other degrees leave, ``moe_sharding_degree=1``
        those that ``ep_degree`` leaves. A single process may have any ``pp_degree``: it then plays
        all ranks itself.

        Args:
            configs: ``strategy.hybrid_configs``.
            world_size: Number of processes of the job.
            whole_size: Number of processes that the degrees are for, if the job goes on with fewer
                processes: then the pipeline has fewer stages. None if it is ``world_size``.

        Raises:
            ConfigError: The degrees do not multiply to ``world_size``, one is below 1, or one does
                not divide the ranks that it splits.
        """
        wanted = {axis: configs.get(f"{axis}_degree", 1) for axis in AXES}
        for axis, degree in wanted.items():
            if axis != "dp" or degree != -1:
                degree_checks.require_degree(f"{axis}_degree", degree)
        cp_in_sharding = degree_checks.separate_cp(wanted, configs.get("cp_sharding_degree", 1))
        asked_pp = degree_checks.shrink_pipeline(wanted, DENSE, world_size, whole_size)
        rest = {axis: wanted[axis] for axis in DENSE if axis != "dp"}
        product = math.prod(rest.values())
        if world_size == 1:
            dense = {**rest, "dp": max(wanted["dp"], 1)}
            if dense["dp"] * product == rest["pp"] and wanted["ep"] * wanted["moe_sharding"] == 1:
                return cls(**dense)
            degree_checks.refuse_alone({**dense, **{axis: wanted[axis] for axis in EXPERT}})
        dp = degree_checks.infer_dp(wanted["dp"], rest, world_size)
        experts = degree_checks.expert_degrees(wanted, world_size // rest["pp"])
        return cls(
            **{**rest, **experts, "dp": dp},
            cp_in_sharding=cp_in_sharding,
            dp_open=wanted["dp"] == -1,
            asked_pp=asked_pp,
        )

    @property
    def replicas(self) -> int:
        """The ranks of the same stage that take different samples: dp x sharding."""
        return self.dp * self.sharding

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(getattr(self, axis) for axis in DENSE)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes along which the optimizer's state is split: Fleet's sharding."""
        return ("sharding", "cp") if self.cp_in_sharding else ("sharding",)

    @property
    def state_shards(self) -> int:
        """The ranks that share the optimizer's state: Fleet's ``sharding_degree``."""
        return self.split(*self.state_axes)

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """The axes along which ranks compute a layer together; with ep all axes but pp."""
        return tuple(a for a in DENSE if a != "pp" and (self.ep > 1 or a not in REPLICA))

    def split(self, *axes: str) -> int:
        """Returns the number of ranks along some axes together: the product of their degrees."""
        return math.prod(getattr(self, axis) for axis in axes)

    def configs(self) -> dict[str, int]:
        """Returns these degrees in the form of Fleet's ``hybrid_configs``."""
        degrees = {f"{axis}_degree": getattr(self, axis) for axis in AXES}
        return {**degrees, "sharding_degree": self.state_shards}

    def require_tree(self, dynamic: bool, device: str) -> None:
        """Refuses degrees with which a rank does not have whole branches of a sum by a tree.

        Args:
            dynamic: Whether the job trains in dynamic graph.
            device: The kind of its devices, such as "cpu".

        Raises:
            ConfigError: The degrees, the graph mode or the device do not allow such sums.
        """
        degree_checks.require_tree({axis: getattr(self, axis) for axis in AXES}, dynamic, device)

    def refuse_beyond(self, supported: Sequence[str], fix: str) -> None:
        """Refuses degrees above 1 along axes that a graph mode does not support.

        Args:
            supported: The axes that it supports.
            fix: What to do instead, for the error.

        Raises:
            ConfigError: A degree is above 1 along another axis.
        """
        degrees = {axis: getattr(self, axis) for axis in AXES if axis not in supported}
        beyond = {axis: degree for axis, degree in degrees.items() if degree > 1}
        if beyond:
            names = ", ".join(f"{axis}_degree" for axis in supported)
            raise ConfigError(
                "this version does not run a pipeline with "
                + degree_checks.degrees_in_words(beyond),
                expected=f"every degree 1 except {names}",
                fix=fix,
            )


class Coordinate(NamedTuple):
    """A rank's coordinate on each axis, from 0; the first rank's by default."""

    dp: int = 0
    pp: int = 0
    sharding: int = 0
    sep: int = 0
    cp: int = 0
    mp: int = 0
    moe_sharding: int = 0
    ep: int = 0

    def leads(self, *but: str) -> bool:
        """Returns whether the rank is first on each axis that numbers ranks, except ``but``."""
        return not any(getattr(self, axis) for axis in DENSE if axis not in but)


@dataclass(frozen=True)
class Mesh:
    """The coordinates of all ranks of a job.

    Attributes:
        order: The axes of :data:`DENSE`; rank numbers change fastest along the last one.
        outer: The axis of :data:`EXPERT` along which the numbers of a stage's ranks change slowest.
        before: Whether moe_sharding splits the ranks before pp does, as in Fleet's order of
            ``["sharding", "moe_sharding", "pp", ..]``.
    """

    degrees: Degrees
    order: tuple[str, ...] = DENSE
    outer: str = "moe_sharding"
    before: bool = False

    @classmethod
    def in_order(cls, degrees: Degrees, order: Sequence[str]) -> Mesh:
        """Returns the mesh of a job whose ranks are numbered by the order of ``hybrid_configs``.

        Args:
            degrees: The number of ranks along each axis.
            order: The axes; rank numbers change fastest along the last one.

        Raises:
            ConfigError: The order has an unknown axis, or an axis twice.
        """
        degree_checks.require_order(order, AXES)
        names = complete_order(order)
        outer, *_ = (axis for axis in names if axis in EXPERT)
        before = names.index("moe_sharding") < names.index("pp")
        return cls(degrees, tuple(axis for axis in names if axis in DENSE), outer, before)

    @functools.cached_property
    def digits(self) -> list[tuple[str, int]]:
        """The axes and sizes by which ranks are numbered, as digits of a number, the slowest first.

        With experts sharding has two digits, as in Fleet: moe_sharding's, and the rest of it.
        """
        sizes = [(axis, getattr(self.degrees, axis)) for axis in self.order]
        state, outer = self.degrees.state_shards, self.degrees.moe_sharding
        if self.degrees.ep == 1 or state % outer:
            return sizes
        sizes = [(a, n) for a, n in sizes if a not in ("sharding", *self.degrees.state_axes)]
        index = sizes.index(("pp", self.degrees.pp))
        inner = ("sharding", state // outer)
        sizes.insert(index + 1, inner)
        sizes.insert(index if self.before else index + 1, ("sharding", outer))
        return sizes

    def coordinate(self, rank: int) -> Coordinate:
        """Returns a rank's coordinate on each axis."""
        coordinates, scale = dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1)
        in_stage, weight = 0, 1
        for axis, size in reversed(self.digits):
            rank, digit = divmod(rank, size)
            coordinates[axis] += digit * scale[axis]
            scale[axis] *= size
            if axis != "pp":
                in_stage += digit * weight
                weight *= size
        if self.degrees.cp_in_sharding and ("cp", self.degrees.cp) not in self.digits:
            # Sharding and cp have one digit together.
            coordinates["sharding"], coordinates["cp"] = divmod(
                coordinates["sharding"], self.degrees.cp
            )
        inner = "ep" if self.outer == "moe_sharding" else "moe_sharding"
        if self.degrees.ep > 1:
            coordinates[self.outer], coordinates[inner] = divmod(
                in_stage, getattr(self.degrees, inner)
            )
        return Coordinate(**coordinates)

    def rank(self, coordinate: Coordinate) -> int:
        """Returns the rank at a coordinate on the axes of :data:`DENSE`."""
        return self._ranks[coordinate[: len(DENSE)]]

    @functools.cached_property
    def _coordinates(self) -> list[Coordinate]:
        """The coordinate of each rank."""
        return [self.coordinate(rank) for rank in range(self.degrees.size)]

    @functools.cached_property
    def _ranks(self) -> dict[tuple[int, ...], int]:
        """The rank at each coordinate on the axes of ``DENSE``."""
        return {c[: len(DENSE)]: rank for rank, c in enumerate(self._coordinates)}

    @functools.cached_property
    def _expert_ranks(self) -> dict[tuple[int, ...], int]:
        """The rank at each coordinate on pp, moe_sharding and ep."""
        return {(c.pp, c.moe_sharding, c.ep): rank for rank, c in enumerate(self._coordinates)}

    def along(self, coordinate: Coordinate, axes: Sequence[str]) -> list[int]:
        """Returns the ranks that differ from one rank on the given axes only, that rank included.

        Args:
            coordinate: The coordinate of the one rank.
            axes: The axes, of :data:`DENSE`, or of :data:`EXPERT` and pp. The ranks are sorted by
                their coordinate on the first axis, then on the next.
        """
        steps = itertools.product(*(range(getattr(self.degrees, axis)) for axis in axes))
        coordinates = [coordinate._replace(**dict(zip(axes, step))) for step in steps]
        if {*axes} & {*EXPERT} and self.degrees.ep > 1:
            return [self._expert_ranks[each.pp, each.moe_sharding, each.ep] for each in coordinates]
        return [self.rank(each) for each in coordinates]

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Returns the ranks of each group along some axes, the group of rank 0 first."""
        ranks_by_lowest: dict[int, list[int]] = {}
        for coordinate in self._coordinates:
            ranks = self.along(coordinate, axes)
            ranks_by_lowest.setdefault(min(ranks), ranks)
        return list(ranks_by_lowest.values())

    def number(self, coordinate: Coordinate, axes: Sequence[str]) -> int:
        """Returns the index, in the result of :meth:`along`, of the rank at a coordinate."""
        number = 0
        for axis in axes:
            number = number * getattr(self.degrees, axis) + getattr(coordinate, axis)
        return number

    def replica(self, coordinate: Coordinate) -> int:
        """Returns the number of the replica to which the rank at a coordinate belongs."""
        return self.number(coordinate, REPLICA)


def complete_order(order: Iterable[str]) -> list[str]:
    """Adds to an order of ``hybrid_configs`` the axes that it lacks, where Fleet has them.

    Paddle ignores the degree of an axis that the order leaves out.
    """
    names = [axis for axis in order if axis in AXES]
    for axis, follower in _FOLLOWERS.items():
        if axis not in names:
            names.insert(names.index(follower) if follower in names else len(names), axis)
    return names


def axis_between(
    coordinates: Mapping[int, Mapping[str, int]], wrong: Collection[int], axes: Iterable[str]
) -> str:
    """Returns the first axis whose coordinates tell wrong ranks from right ones; "" if none.

    Args:
        coordinates: By rank, its coordinates on the axes; an axis that is missing counts as 0.
        wrong: The wrong ranks, some of these.
        axes: The axes, likely ones first.
    """
    right = coordinates.keys() - {*wrong}
    for axis in axes:
        of_wrong = {coordinates[rank].get(axis, 0) for rank in wrong}
        of_right = {coordinates[rank].get(axis, 0) for rank in right}
        if of_wrong and of_right and of_wrong.isdisjoint(of_right):
            return axis
    return ""


def of_unequal(axis: str, step: int) -> str:
    """Returns, for an error, why ranks that share a weight probably have different values.

    Args:
        axis: The axis along which the ranks with other values lie; "" if unknown.
        step: The step at whose beginning the values differ, from 0.
    """
    if step:
        return f"the weight was changed on some ranks after the step; they must agree along {axis}"
    return f"ranks begin with different values along {axis or 'all axes'}: a missing broadcast"
