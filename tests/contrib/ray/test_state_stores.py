"""Which copies of kept states the nodes' stores hold, and what is placed from them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from fleetpipe.contrib.kept_state import copies
from fleetpipe.contrib.kept_state.kept_state import Segment
from fleetpipe.contrib.ray import state_stores
from fleetpipe.contrib.ray.state_stores import Begun, CopyKey, StateStore
from fleetpipe.errors import CheckpointError


class _Handle:
    """Calls a store as Ray's handle of an actor does."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return Mock(remote=lambda *words: asyncio.ensure_future(method(*words)))


def _keep(store: StateStore, rank: int, step: int) -> None:
    """Keeps a state whose bytes tell rank and step."""
    segment = Segment.create(store._kept / f"rank-{rank}.1", {"layout": rank}, [8], 4)
    segment.write(step, [memoryview(bytes([rank, step] * 4))], b"text")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StateStore]:
    monkeypatch.setattr(state_stores, "keeper_process", contextlib.nullcontext)
    monkeypatch.setattr(
        state_stores.ray, "put", lambda copy: copy._replace(contents=copy.contents.copy())
    )
    stores = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        monkeypatch.setattr(
            state_stores, "state_folder", lambda at=folder: contextlib.nullcontext(at)
        )
        stores.append(StateStore(Mock()))
    return stores


async def _begin(stores: Sequence[StateStore], attempt: int, keeps: Any = None) -> None:
    begun = Begun(attempt, 1, 2, [*map(_Handle, stores)], keeps)
    for rank, store in enumerate(stores):
        await store.begin(begun, [rank] if attempt > 1 else [], rank)


async def _copied(store: StateStore, rank: int, step: int) -> None:
    _keep(store, rank, step)
    await store._read(CopyKey(store._begun.attempt, step, rank))
    await asyncio.gather(*store._tasks)


def test_a_step_is_held_by_two_nodes_until_all_ranks_have_a_later_one(
    two: list[StateStore],
) -> None:
    async def train() -> None:
        await _begin(two, 1)
        await _copied(two[0], 0, 10)
        await _copied(two[1], 1, 10)
        # Rank 0 is ahead: nothing of step 10 goes before rank 1 has the next one as well.
        await _copied(two[0], 0, 20)
        for store in two:
            assert sorted(await store.held()) == [(1, 10, 0), (1, 10, 1), (1, 20, 0)]
        waiting = asyncio.ensure_future(_copied(two[0], 0, 30))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await _copied(two[1], 1, 20)
        await waiting
        for store in two:
            assert sorted(await store.held()) == [(1, 20, 0), (1, 20, 1), (1, 30, 0)]

    asyncio.run(train())


def test_a_copy_is_placed_with_its_bytes_and_no_others_stay(two: list[StateStore]) -> None:
    async def train() -> None:
        await _begin(two, 1)
        for rank, store in enumerate(two):
            await _copied(store, rank, 10)
        await _copied(two[1], 1, 20)
        await _begin(two[::-1], 2, (1, 10))
        assert sorted(await two[0].held()) == [(1, 10, 0), (1, 10, 1)]
        # What rank 0 kept here is gone: it is the other node's rank now.
        assert not [*two[0]._kept.glob("rank-*")]
        await two[0].place(1, 10, await two[1].copy(CopyKey(1, 10, 1)))
        found = copies.find(two[0]._kept.glob("rank-1.*"), 10)
        assert found is not None
        slots, copy = found
        assert slots.form.slots == 2
        assert bytes(copy.contents[-64:-56]) == bytes([1, 10] * 4)
        assert bytes(slots.text_of(0)) == b"text"

    asyncio.run(train())


def test_a_state_that_is_written_over_while_it_is_read_is_not_held(
    two: list[StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(copy: copies.Copy) -> copies.Copy:
        found = copies.find(two[0]._kept.glob("rank-0.*"), 10)
        assert found is not None
        found[0].forget_after(0)
        return copy

    async def train() -> None:
        await _begin(two, 1)
        monkeypatch.setattr(state_stores.ray, "put", put)
        await _copied(two[0], 0, 10)
        assert [await store.held() for store in two] == [[], []]

    asyncio.run(train())


def test_a_node_without_memory_is_told_once_and_ranks_train_on(
    two: list[StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("does not fit", fix="more memory")

    async def train() -> None:
        await _begin(two, 1)
        monkeypatch.setattr(copies, "write", full)
        two[0]._mailbox.report.remote = Mock(side_effect=lambda _: asyncio.sleep(0))
        await _copied(two[0], 0, 10)
        await asyncio.sleep(0)
        (report,) = two[0]._mailbox.report.remote.call_args.args
        assert b"copied to no other host any more: does not fit" in report.value
        # Nobody waits for a step that will never be complete.
        await asyncio.wait_for(_copied(two[0], 0, 20), 5)

    asyncio.run(train())


def test_a_rank_asks_at_the_socket_and_goes_on_where_nobody_answers(
    two: list[StateStore],
) -> None:
    async def train() -> None:
        store = two[0]
        folder = Path(await store.open())
        await _begin(two, 1)
        _keep(store, 0, 10)
        await asyncio.to_thread(copies.request, folder, 0, 10)
        await asyncio.gather(*store._tasks)
        assert await two[1].held() == [(1, 10, 0)]
        copies.request(folder / "nowhere", 0, 20)

    asyncio.run(train())
