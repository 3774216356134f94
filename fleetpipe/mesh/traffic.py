"""Counts the bytes that a process sends to other members of groups, while a profile asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Counters of exchanges, tokens and attention.

    Attributes:
        exchanges: Number of all_to_all and reduce_scatter operations.
        nbytes: Bytes sent to other members.
        routed: Bytes of the tokens that go to experts, those of this process included.
        loads: For each mixture that ran, the tokens that go to each of its experts.
        expert_seconds: Seconds that the experts of this process computed.
        queries: Bytes of the queries, for attention over whole sequences.
        keys: Bytes of the keys and values of that attention.
        heads: For each attention that ran, the heads of its queries.
        clock: Returns seconds.
    """

    exchanges: int = 0
    nbytes: int = 0
    routed: int = 0
    loads: list[list[int]] = field(default_factory=list)
    expert_seconds: float = 0.0
    queries: int = 0
    keys: int = 0
    heads: list[int] = field(default_factory=list)
    clock: Callable[[], float] = time.thread_time

    def add(self, parts: Iterable[Any]) -> None:
        """Counts one exchange, with a tensor for each other member."""
        # Late: a mesh is looked at where no Paddle is, too.
        from fleetpipe.paddle_api.tensor import tensor_bytes

        self.exchanges += 1
        self.nbytes += sum(map(tensor_bytes, parts))

    def attend(self, query: Any, key: Any) -> None:
        """Counts one attention of queries over keys and as many values."""
        from fleetpipe.paddle_api.tensor import tensor_bytes

        self.queries += tensor_bytes(query)
        self.keys += 2 * tensor_bytes(key)
        self.heads.append(query.shape[2])


_counting: list[Traffic] = []


@contextmanager
def counting(clock: Callable[[], float] = time.thread_time) -> Iterator[Traffic]:
    """While this context is open, counts exchanges, and the seconds of ``clock`` in experts."""
    traffic = Traffic(clock=clock)
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note(parts: Iterable[Any]) -> None:
    """Reports an exchange to the open counters; see :meth:`Traffic.add`."""
    for traffic in _counting:
        traffic.add(parts)


def note_attention(query: Any, key: Any) -> None:
    """Reports an attention to the open counters; see :meth:`Traffic.attend`."""
    for traffic in _counting:
        traffic.attend(query, key)


def note_tokens(rows: int, row_bytes: int, counts: Any) -> None:
    """Reports to the open counters that experts start on ``rows`` tokens, ``counts`` for each."""
    for traffic in _counting:
        traffic.routed += rows * row_bytes
        traffic.loads.append(counts.flatten().tolist())
        traffic.expert_seconds -= traffic.clock()


def note_outputs() -> None:
    """Reports to the open counters that the experts have finished."""
    for traffic in _counting:
        traffic.expert_seconds += traffic.clock()
