"""The degrees of a job: how many ways each axis is split, checked before any process waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetpipe.errors import ConfigError

AXES = ("dp", "pp", "sharding", "sep", "mp")


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
            ConfigError: The degrees do not multiply to ``world_size``, or ask for more than
                pipeline parallelism.
        """
        given = {axis: configs.get(f"{axis}_degree", 1) for axis in AXES}
        others = {axis: max(int(given[axis]), 1) for axis in AXES if axis != "dp"}
        ranks_per_replica = 1
        for degree in others.values():
            ranks_per_replica *= degree
        if world_size == 1 and others["pp"] == ranks_per_replica and given["dp"] in (-1, 0, 1):
            return cls(dp=1, **others)
        if world_size % ranks_per_replica:
            raise ConfigError(
                f"the degrees (={_text(others)}) do not divide the world size (={world_size})",
                expected=f"a multiple of {ranks_per_replica} processes",
                got=f"{world_size} processes",
                fix=f"launch with --nproc_per_node {ranks_per_replica}, or lower pp_degree",
            )
        inferred = world_size // ranks_per_replica
        dp = inferred if given["dp"] < 1 else int(given["dp"])
        if dp != inferred:
            raise ConfigError(
                f"the degrees multiply to {dp * ranks_per_replica}, the job has {world_size} ranks",
                expected=f"dp_degree={inferred}, or -1 to have it worked out",
                got=f"dp_degree={dp} with {_text(others)}",
            )
        return cls(dp=dp, **others)

    @property
    def beyond(self) -> dict[str, int]:
        """The axes above 1 that this version does not run beside a pipeline."""
        return {axis: n for axis in ("sharding", "sep", "mp") if (n := getattr(self, axis)) > 1}

    def refuse_beyond(self) -> None:
        """Refuses what this version does not run.

        Raises:
            ConfigError: An axis other than those of pipeline and data parallelism is above 1.
        """
        if self.beyond:
            raise ConfigError(
                f"this version does not run a pipeline with {_text(self.beyond)}",
                expected="every degree 1 except pp_degree and dp_degree",
            )


def _text(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())
