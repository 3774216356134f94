"""Members of a group in one process: a thread for each, which wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import paddle


class ThreadGroup:
    """One member of a group, whose other members are other threads."""

    def __init__(self, rank: int, shared: tuple[list[Any], threading.Barrier]) -> None:
        self.rank = rank
        self._values, self._barrier = shared
        self.ranks = len(self._values)

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        return self.all_gather(value)[source]

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            first, *others = self.all_gather(tensor.clone())
            tensor.set_value(sum(others, start=first))

    def broadcast_each(self, tensors: Sequence[tuple[Any, int]]) -> None:
        for tensor, source in tensors:
            tensor.set_value(self.broadcast(tensor.clone(), source))


def members(ranks: int) -> list[ThreadGroup]:
    """Makes a group; each member is for one thread."""
    shared = ([None] * ranks, threading.Barrier(ranks, timeout=30))
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
