"""Which rows of a dataset each rank gets: those of its replica, which all ranks of it share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train

from fleetpipe.mesh.axes import DENSE, Degrees, Mesh


def replicas(hybrid_configs: Mapping[str, Any], ranks: int) -> list[int]:
    """Returns the replica (dp and sharding) that each rank is part of, by rank.

    Args:
        hybrid_configs: Those of the strategy; without ``dp_degree`` it is worked out, as there.
        ranks: How many there are.

    Raises:
        ConfigError: The degrees do not fit as many ranks.
    """
    degrees = Degrees.resolve({"dp_degree": -1, **hybrid_configs}, ranks)
    if ranks == 1:
        return [0]
    mesh = Mesh.in_order(degrees, hybrid_configs.get("order") or DENSE)
    return [mesh.replica(mesh.coordinate(rank)) for rank in range(ranks)]


class ReplicaDataConfig(ray.train.DataConfig):
    """Splits datasets by replica: its ranks read the same batches, other replicas other ones.

    Each dataset is computed once and held in Ray's object store, so that what is random in it is
    the same for all ranks of a replica.
    """

    def __init__(self, hybrid_configs: Mapping[str, Any]) -> None:
        """Takes the degrees of the strategy, which tell the replicas."""
        super().__init__()
        self._hybrid_configs = hybrid_configs

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        """Returns what each rank reads of each dataset, by rank; Ray calls it."""
        of_rank = replicas(self._hybrid_configs, world_size)
        read: list[dict[str, Any]] = [{} for _ in of_rank]
        for name, dataset in datasets.items():
            parts = dataset.materialize().split(max(of_rank) + 1, equal=True)
            for rank, replica in enumerate(of_rank):
                read[rank][name] = parts[replica].iterator()
        return read
