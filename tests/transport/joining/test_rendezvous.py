"""The wait for other ranks at a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from fleetpipe.errors import FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.transport import limit
from fleetpipe.transport.limit import Limit, await_keys
from tests.transport.helpers import ThreadStore

pytestmark = pytest.mark.once

KEYS = {rank: f"here/{rank}" for rank in range(100)}


class CountingStore(ThreadStore):
    """Counts what is asked; each rank comes when it has been asked for thrice."""

    def __init__(self, never: Collection[int] = ()) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self._never = {KEYS[rank] for rank in never}

    def add(self, key: str, amount: int) -> int:
        self.asked[key] += 1
        return int(self.asked[key] >= 3 and key not in self._never)


def failure(missing: list[int], ended: set[int]) -> FleetPipeError:
    kind = PeerFailed if ended else PipelineTimeout
    return kind(f"{missing} {sorted(ended)}")


def test_each_key_is_asked_for_until_its_rank_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit.time, "sleep", lambda _: None)
    store = CountingStore()
    assert list(await_keys(store, KEYS, Limit(60), failure)) == list(KEYS)
    assert set(store.asked.values()) == {3}


def test_at_the_limit_all_who_are_missing_are_named() -> None:
    store = CountingStore(never=[2, 5])
    for rank in KEYS:
        store.asked[KEYS[rank]] = 3
    arriving = await_keys(store, KEYS, Limit(0), failure)
    with pytest.raises(PipelineTimeout, match=r"^\[2, 5\] \[\]"):
        list(arriving)


def test_who_has_ended_before_it_came_ends_the_wait() -> None:
    store = CountingStore(never=[2, 5])
    arriving = await_keys(store, KEYS, Limit(60), failure, lambda: [5])
    with pytest.raises(PeerFailed, match=r"\[5\]$"):
        list(arriving)


def test_who_has_come_may_end_while_others_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore(never=[2])
    store.asked[KEYS[5]] = 3
    naps: list[float] = []
    monkeypatch.setattr(limit.time, "sleep", naps.append)
    arriving = await_keys(
        store, KEYS, Limit(60), failure, lambda: [5], given_up=lambda: len(naps) > 20
    )
    with pytest.raises(PipelineTimeout, match=r"^\[2\] \[\]"):
        list(arriving)
    # It sleeps between its looks, longer and longer.
    assert naps[0] < naps[-1] == max(naps)
