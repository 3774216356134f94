"""Members of a group in one process: threads, or one where all have what the first one has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.distributed.communication.group import Group

from fleetpipe.mesh.groups import DirectGroup
from tests.transport.helpers import LIMIT, join_all


class ThreadGroup:
    """One member of a group, whose other members are other threads."""

    def __init__(
        self, rank: int, shared: tuple[list[Any], threading.Barrier, list[list[Any]]]
    ) -> None:
        self.rank = rank
        self._values, self._barrier, self._given = shared
        self.ranks = len(self._values)
        self._begun = 0

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def begin_all_gather(self, value: Any) -> ThreadGathering:
        self._given[self.rank].append(value)
        self._begun += 1
        return ThreadGathering(self._given, self._begun)

    def broadcast(self, value: Any, source: int) -> Any:
        return self.all_gather(value)[source]

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            first, *others = self.all_gather(tensor.clone())
            tensor.set_value(sum(others, start=first))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        for tensor, source in tensors:
            tensor.set_value(self.broadcast(tensor.clone(), source))


class ThreadGathering:
    """What the threads have given so far in one of their gatherings."""

    def __init__(self, given: list[list[Any]], number: int) -> None:
        self._given, self._number = given, number

    def arrived(self) -> bool:
        return all(len(values) >= self._number for values in self._given)

    def values(self) -> list[Any]:
        deadline = time.monotonic() + 30
        while not self.arrived():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return [values[self._number - 1] for values in self._given]


def thread_members(ranks: int) -> list[ThreadGroup]:
    """Makes a group; each member is for one thread."""
    given: list[list[Any]] = [[] for _ in range(ranks)]
    shared = ([None] * ranks, threading.Barrier(ranks, timeout=30), given)
    return [ThreadGroup(rank, shared) for rank in range(ranks)]


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
