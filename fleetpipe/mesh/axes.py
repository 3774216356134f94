"""The axes along which the ranks of a job are split, and every rank's place on each.

An axis that a job may have is a field of :class:`Degrees` and of :class:`Coordinate`. Those in
``FOREIGN`` are Fleet's, and no pipeline has them yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError

#: Those of a replica of the model: the ranks along them hold the same parameters.
REPLICA = ("dp", "sharding")
#: Those that a pipeline in dynamic graph may be combined with, and itself.
PIPELINE_AXES = ("pp", "dp", "sharding", "mp")


@dataclass(frozen=True)
class Degrees:
    """How many ways each axis of ``hybrid_configs`` is split; their product is the world size."""

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    sep: int = 1
    mp: int = 1

    @classmethod
    def resolve(cls, configs: Mapping[str, Any], world_size: int) -> Degrees:
        """Reads ``hybrid_configs``, works out ``dp_degree=-1`` and checks the product.

        A single process may ask for any ``pp_degree``: it then plays all ranks itself.

        Args:
            configs: ``strategy.hybrid_configs``.
            world_size: Number of processes of the job.

        Raises:
            ConfigError: The degrees do not multiply to ``world_size``, or one is below 1.
        """
        wanted = {axis: configs.get(f"{axis}_degree", 1) for axis in AXES}
        rest = {axis: n for axis, n in wanted.items() if axis != "dp"}
        for axis, degree in rest.items():
            require_degree(f"{axis}_degree", degree)
        ranks_per_replica = 1
        for degree in rest.values():
            ranks_per_replica *= degree
        if world_size == 1 and rest["pp"] == ranks_per_replica and wanted["dp"] in (-1, 0, 1):
            return cls(dp=1, **rest)
        needed = ranks_per_replica * max(wanted["dp"], 1)
        if world_size % ranks_per_replica:
            text = _text(rest) + (f", dp_degree={wanted['dp']}" if wanted["dp"] > 1 else "")
            raise ConfigError(
                f"the degrees (={text}) do not divide the world size (={world_size})",
                expected=f"a multiple of {ranks_per_replica} processes",
                got=f"{world_size} processes",
                fix=f"launch with --nproc_per_node {needed}, or lower a degree",
            )
        inferred = world_size // ranks_per_replica
        dp = inferred if wanted["dp"] < 1 else wanted["dp"]
        if dp != inferred:
            raise ConfigError(
                f"the degrees multiply to {needed}, the job has {world_size} ranks",
                expected=f"dp_degree={inferred}, or -1 to have it worked out",
                got=f"dp_degree={dp} with {_text(rest)}",
                fix=f"launch with --nproc_per_node {needed}, or change a degree",
            )
        return cls(dp=dp, **rest)

    @property
    def replicas(self) -> int:
        """The ranks that hold the same parameters of the same stages: dp x sharding."""
        return self.dp * self.sharding

    def refuse_beyond(self, supported: Sequence[str], fix: str) -> None:
        """Refuses degrees that a graph mode does not run.

        Args:
            supported: The axes that may be split.
            fix: What to use instead.

        Raises:
            ConfigError: Another axis is above 1.
        """
        beyond = {a: n for a in AXES if a not in supported and (n := getattr(self, a)) > 1}
        if beyond:
            names = ", ".join(f"{axis}_degree" for axis in supported)
            raise ConfigError(
                f"this version does not run a pipeline with {_text(beyond)}",
                expected=f"every degree 1 except {names}",
                fix=fix,
            )


#: By name, in Paddle's order: ranks are numbered along the last one first.
AXES = tuple(field.name for field in fields(Degrees))


class Coordinate(NamedTuple):
    """A rank's place on each axis, from 0; the first rank's by default."""

    dp: int = 0
    pp: int = 0
    sharding: int = 0
    sep: int = 0
    mp: int = 0

    def leads(self, *but: str) -> bool:
        """Whether the rank is the first on every axis, or on every one but some.

        Args:
            but: The axes on which its place does not matter.
        """
        return not any(place for axis, place in self._asdict().items() if axis not in but)


@dataclass(frozen=True)
class Mesh:
    """All places of a job, and the ranks that have them."""

    degrees: Degrees
    order: tuple[str, ...] = AXES

    @classmethod
    def in_order(cls, degrees: Degrees, order: Iterable[str]) -> Mesh:
        """Returns the mesh of a job whose ranks are numbered in an order of ``hybrid_configs``.

        Args:
            degrees: How many ways each axis is split.
            order: The axes, the one along which ranks are numbered first last; others are left out.
        """
        return cls(degrees, tuple(axis for axis in order if axis in AXES))

    def coordinate(self, rank: int) -> Coordinate:
        """Returns a rank's place on each axis."""
        places = {}
        for axis in reversed(self.order):
            rank, places[axis] = divmod(rank, getattr(self.degrees, axis))
        return Coordinate(**places)

    def rank(self, coordinate: Coordinate) -> int:
        """Returns the rank with some place."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self.degrees, axis) + getattr(coordinate, axis)
        return rank

    def along(self, coordinate: Coordinate, axes: Sequence[str]) -> list[int]:
        """Returns the ranks whose places differ from one on some axes only.

        Args:
            coordinate: The place of one of them.
            axes: The axes that they span; their order is that of the places on the last axis, then
                on the one before.
        """
        spans = itertools.product(*(range(getattr(self.degrees, axis)) for axis in axes))
        return [self.rank(coordinate._replace(**dict(zip(axes, places)))) for places in spans]

    def replica(self, coordinate: Coordinate) -> int:
        """Returns the number of the replica that the rank with some place is part of."""
        number = 0
        for axis in REPLICA:
            number = number * getattr(self.degrees, axis) + getattr(coordinate, axis)
        return number


def require_degree(name: str, degree: Any, least: int = 1) -> None:
    """Refuses a degree that is no number of ranks.

    Args:
        name: Its name in ``hybrid_configs``.
        degree: Its value there.
        least: The smallest that is taken.

    Raises:
        ConfigError: It is no int, or below ``least``.
    """
    if isinstance(degree, bool) or not isinstance(degree, Integral) or degree < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}",
            where="strategy.hybrid_configs",
            got=f"{name}={degree!r}",
            fix=f"set strategy.hybrid_configs = {{{name!r}: 2}}, or leave it out",
        )


def runs_without_pipeline(configs: Mapping[str, Any]) -> bool:
    """Whether the ranks are split along axes of Fleet's that no pipeline of fleetpipe's has.

    Args:
        configs: ``strategy.hybrid_configs``.

    Raises:
        ConfigError: ``pp_degree`` is above 1 as well.
    """
    refused = {axis: n for axis in FOREIGN if (n := configs.get(f"{axis}_degree", 1)) > 1}
    if refused and configs.get("pp_degree", 1) > 1:
        raise ConfigError(
            f"a pipeline does not run with {_text(refused)}",
            expected="every degree 1 except pp_degree, dp_degree, sharding_degree and mp_degree",
            fix="use mp_degree, dp_degree or sharding_degree for these ranks",
        )
    return bool(refused)


#: Axes that 3.3 has beside those of :data:`AXES`.
FOREIGN = ("cp", "ep", "moe_sharding")


def refuse_sharding_options(strategy: Any) -> None:
    """Refuses what shards more than the optimizer's state, or shards it in another way.

    Raises:
        ConfigError: The strategy asks for it.
    """
    if strategy.sharding and strategy.sharding_configs.get("stage", 1) > 1:
        _refuse_sharding(f"sharding_configs['stage'] = {strategy.sharding_configs['stage']}")
    configs = strategy.hybrid_configs.get("sharding_configs")
    for option in _SHARDING_BY_REDUCE_SCATTER:
        if getattr(configs, option, False):
            _refuse_sharding(f"hybrid_configs['sharding_configs'].{option} = True")


#: split_param is Fleet's version 2 of the sharded optimizer.
_SHARDING_BY_REDUCE_SCATTER = ("split_param", "tensor_fusion", "comm_overlap")


def _refuse_sharding(got: str) -> None:
    raise ConfigError(
        "sharding_degree above 1 runs stage 1: each rank keeps the state of whole parameters",
        got=got,
        cause="that needs reduce_scatter, which Gloo, Paddle's CPU backend, does not have",
        fix="leave it out: every rank then still holds 1/sharding_degree of the optimizer's state",
    )


def _text(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())
