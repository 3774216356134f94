"""Members of a group in one process: threads, or one where all have what the first one has."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.distributed.communication.group import Group

from fleetpipe.mesh.groups import DirectGroup
from tests.transport.helpers import LIMIT, join_all


def thread_members(ranks: int) -> list[DirectGroup]:
    """Connects the members of a group by sockets, each for one thread, until they are freed."""
    members = []
    for transport in join_all(ranks):
        members.append(DirectGroup(transport, 60.0))
        weakref.finalize(members[-1], transport.close)
    return members


def on_all(ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """Returns what ``run(rank)`` returns or raises, each in a thread of its own."""
    results: list[Any] = [None] * ranks

    def keep(rank: int) -> None:
        paddle.set_device("cpu")
        try:
            results[rank] = run(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


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


@contextmanager
def threads(ranks: int) -> Iterator[list[DirectGroup]]:
    """Connects the members of a group by sockets, each for one thread."""
    transports = join_all(ranks)
    yield [DirectGroup(transport, LIMIT) for transport in transports]
    for transport in transports:
        transport.close()


def on_members(members: list[Any], run: Callable[[Any], Any]) -> list[Any]:
    """Returns what ``run(member)`` returns, each in a thread of its own."""
    with ThreadPoolExecutor(len(members)) as executor:
        return list(executor.map(run, members))
