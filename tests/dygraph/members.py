"""Members of a model-parallel group in one process, where all have what the first one has."""

from __future__ import annotations

from typing import Any

from paddle.distributed.communication.group import Group

#: What each of two members sees of their group.
MEMBERS = [Group(rank, 77, [0, 1]) for rank in range(2)]
#: The layers, which Fleet has at several paths.
NAMES = (
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ParallelCrossEntropy",
)


class Twins:
    """The connections of such members; counts the collectives."""

    def __init__(self, ranks: int = 2) -> None:
        self.rank, self.ranks = 0, ranks
        self.gathered = self.reduced = 0

    def all_gather(self, value: Any) -> list[Any]:
        self.gathered += 1
        return [value] * self.ranks

    def all_reduce(self, tensors: list[Any]) -> None:
        self.reduced += 1
        for tensor in tensors:
            tensor.set_value(tensor * self.ranks)
