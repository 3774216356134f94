"""States go to a neighbour and come back, over real connections between hosts in one process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.job import life
from fleetpipe.launch.keeping import copies as module
from fleetpipe.launch.keeping import passing
from fleetpipe.launch.keeping.copies import Copies, Message
from fleetpipe.launch.keeping.passing import COPIES, Ended, Passage, Refused
from fleetpipe.launch.keeping.pins import Pins
from fleetpipe.launch.keeping.places import Claim
from fleetpipe.launch.keeping.slots import Form, Slots, Stamp

MARK = 77
FORM = Form(b"what a rank has", 64, 5000, 4)


class Host:
    """A host with one rank, whose number is that of the host."""

    def __init__(self, folder: Path, node: int) -> None:
        self.node = node
        self.folder = folder
        self.home = folder / "life"
        for path in (folder / "kept", self.home):
            path.mkdir(parents=True)
        life.note_start(self.home, node, 1)
        self.warned: list[str] = []
        self.copies = Copies(folder, "127.0.0.1", self.warned.append)

    def begin(self, number: int, neighbour: str) -> None:
        self.copies.begin(Claim(number, 2, self.node), MARK, neighbour, self.home)

    def keep(self, *steps: int) -> None:
        file = self.folder / "kept" / f"rank-{self.node}.1"
        slots = Slots(file) if file.exists() else Slots.create(file, FORM)
        pins = Pins.of(self.folder / "kept")
        for step in steps:
            slot = slots.begin([] if pins is None else pins.states)
            slots.contents(slot)[:] = state(self.node, step)
            slots.end(slot, Stamp(MARK, step), 11)

    def asks(self, kind: str, **fields: Any) -> None:
        fields = {"life": 3, "safe_life": 0, "safe_step": 0, **fields}
        self.copies.obey({"kind": kind, **fields})

    def news(self) -> list[Message]:
        """Waits for the next news."""
        self.copies._read.settimeout(30)
        return self.copies.news()

    def has(self, where: str, rank: int) -> list[int]:
        """Returns the steps of a rank that are there; they have the right bytes."""
        found = []
        for file in (self.folder / where).glob(f"rank-{rank}.*"):
            slots = Slots(file)
            for stamp in slots.stamps():
                slot = slots.slot_of(stamp)
                assert slot is not None
                assert bytes(slots.contents(slot)) == state(rank, stamp.step)
                assert len(slots.text_of(slot)) == 11
                found.append(stamp.step)
        return found


def state(rank: int, step: int) -> bytes:
    return bytes([rank, step]) * ((64 + 5056) // 2)


@pytest.fixture(params=["open", "sealed"])
def hosts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Host]]:
    """Two hosts in life 3 of a job, and one that comes later."""
    monkeypatch.delenv("FLEETPIPE_SECRET", raising=False)
    if request.param == "sealed":
        monkeypatch.setenv("FLEETPIPE_SECRET", "correct horse battery staple")
    monkeypatch.setattr(passing, "_PART_BYTES", 1000)
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 0.2)
    made = [Host(tmp_path / name, node) for name, node in (("a", 0), ("b", 1), ("c", 1))]
    made[0].begin(3, made[1].copies.where)
    made[1].begin(3, made[0].copies.where)
    yield made
    for host in made:
        host.copies.close()


def whole(step: int) -> list[Message]:
    return [{"kind": "mirrored", "life": 3, "step": step, "outcome": "whole"}]


def test_states_go_to_the_neighbour_and_come_back_to_who_takes_the_place(hosts: list[Host]) -> None:
    first, second, third = hosts
    for host in (first, second):
        host.asks("mirror", step=4)
        host.keep(1, 2, 3, 4, 5, 6, 7, 8)
        assert host.news() == whole(4)
    for host in (first, second):
        host.asks("mirror", step=10, safe_life=MARK, safe_step=4)
        host.keep(9, 10, 11)
        assert host.news() == whole(10)
        assert host.has("kept", host.node) == [4, 9, 10, 11]
    assert (first.has("held", 1), second.has("held", 0)) == ([4, 10], [4, 10])
    # The second host is lost, and the third has its place in the next life.
    third.asks("expect", life=4, nodes=2, node=1)
    first.asks("give", life=4, to=third.copies.where, held=True, kept=True)
    assert first.news() == [{"kind": "gave", "life": 4}]
    assert third.has("kept", 1) == third.has("held", 0) == [4, 10]
    third.begin(4, first.copies.where)
    first.begin(4, third.copies.where)
    # They stay until there are newer ones, for the first host may be the next that is lost.
    third.keep(12, 13, 14)
    assert third.has("kept", 1) == [4, 10, 13, 14]
    assert third.has("held", 0) == [4, 10]
    assert [host.warned for host in hosts] == [[], [], []]


def test_what_was_not_safe_goes_before_what_was(hosts: list[Host]) -> None:
    first, second, _ = hosts
    for step, safe in ((2, 0), (4, 2), (6, 2)):  # 4 has come, but not to all hosts
        for host in (first, second):
            host.asks("mirror", step=step, safe_life=MARK, safe_step=safe)
        first.keep(step)
        assert first.news() == whole(step)
    assert second.has("held", 0) == [2, 6]


def test_a_step_that_is_over_is_missed(hosts: list[Host]) -> None:
    first = hosts[0]
    first.keep(1, 2, 3)
    first.asks("mirror", step=2)
    assert first.news()[0]["outcome"] == "missed"
    assert hosts[1].has("held", 0) == []


def test_a_neighbour_that_cannot_be_reached_is_told_of_once_until_it_can(hosts: list[Host]) -> None:
    first, second, _ = hosts
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = f"127.0.0.1:{nobody.getsockname()[1]}"
    first.begin(3, gone)
    for step in (1, 2):
        first.asks("mirror", step=step)
        first.keep(step)
        assert first.news()[0]["outcome"] == "failed"
    (said,) = first.warned
    assert said.startswith(f"this host's state after 1 steps is not copied to its neighbour {gone}")
    assert "training goes on" in said
    first.begin(3, second.copies.where)
    first.asks("mirror", step=3)
    first.keep(3)
    assert first.news() == whole(3)
    assert second.has("held", 0) == [3]


def test_a_neighbour_without_memory_says_so(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = hosts
    first.asks("mirror", step=1)
    first.keep(1)
    assert first.news() == whole(1)
    reserve = os.posix_fallocate

    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    (second.folder / "held" / "rank-0.1").unlink()
    first.asks("mirror", step=2)
    first.keep(2)
    assert first.news()[0]["outcome"] == "failed"
    assert f"does not fit into {second.folder / 'held'}" in first.warned[0]
    assert [*(second.folder / "held").iterdir()] == []
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    first.asks("mirror", step=3)
    first.keep(3)
    assert first.news() == whole(3)


def test_another_place_in_the_ring_is_another_memory(hosts: list[Host]) -> None:
    first, second, _ = hosts
    first.asks("mirror", step=1)
    first.keep(1)
    assert first.news() == whole(1)
    second.copies.begin(Claim(4, 3, 1), MARK, first.copies.where, second.home)
    assert second.has("held", 0) == []
    first.copies.begin(Claim(4, 1, 0), 0, "", first.home)
    assert first.has("kept", 0) == []
    assert Pins.of(first.folder / "kept") is None


def test_who_is_of_another_life_gives_nothing(hosts: list[Host]) -> None:
    first, second, _ = hosts
    second.begin(4, first.copies.where)
    first.asks("mirror", step=1)
    first.keep(1)
    assert first.news()[0]["outcome"] == "failed"
    assert second.has("held", 0) == []


def test_who_does_not_know_the_secret_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.current_thread()
    key = passing._secret
    monkeypatch.setattr(
        passing, "_secret", lambda: key() if threading.current_thread() is own else bytes(32)
    )
    folder = kept(tmp_path)
    assert not passed(folder, Stamp(MARK, 1), 99, "sends")
    assert [*(folder / "held").iterdir()] == []


@pytest.mark.parametrize("parts", range(9))
def test_a_transfer_that_ends_anywhere_leaves_what_was_there(tmp_path: Path, parts: int) -> None:
    """A state is five parts behind one of words: whichever end stops, at whichever part."""
    for stops in ("sends", "takes"):
        folder = kept(tmp_path / stops)
        assert passed(folder, Stamp(MARK, 1), 99, stops)
        done = passed(folder, Stamp(MARK, 2), parts, stops)
        held = Slots(folder / "held" / "rank-0.1")
        assert [stamp.step for stamp in held.stamps()] == ([1, 2] if done else [1])
        for stamp in held.stamps():
            slot_ = held.slot_of(stamp)
            assert slot_ is not None
            assert bytes(held.contents(slot_)) == state(0, stamp.step)


def kept(folder: Path) -> Path:
    """Returns a folder in which a rank has kept two states."""
    for path in ("kept", "held"):
        (folder / path).mkdir(parents=True)
    slots = Slots.create(folder / "kept" / "rank-0.1", FORM)
    for step in (1, 2):
        slot = slots.begin()
        slots.contents(slot)[:] = state(0, step)
        slots.end(slot, Stamp(MARK, step), 11)
    return folder


def passed(folder: Path, stamp: Stamp, parts: int, stops: str) -> bool:
    """Sends a state, up to some part; returns whether it was to come through."""
    left = {stops: [True] * parts}
    ends = socket.socketpair()

    def goes_on(side: str) -> bool:
        return side != stops or bool(left[side] and left[side].pop())

    def take() -> None:
        try:
            passage = Passage.of(ends[1], 3, lambda: goes_on("takes"))
            passage.take(folder / "held", 2, list)
        except (Ended, *passing.FAILURES):
            pass
        finally:
            ends[1].close()

    other = threading.Thread(target=take)
    other.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "_PART_BYTES", 1100)
        patch.setattr(socket, "create_connection", lambda *_: ends[0])
        try:
            passage = Passage.to(("", 0), 3, COPIES, lambda: goes_on("sends"))
            passage.send(folder / "kept" / "rank-0.1", stamp)
        except (Ended, *passing.FAILURES):
            return False
        finally:
            ends[0].close()
            other.join()
    return True


@pytest.mark.parametrize(
    "change",
    [
        *({"file": "../../x"}, {"file": "pins"}, {"text": 65}, {"step": -1}, {"about": -1}),
        *({"life": ""}, {"about": 1 << 40}, {"text_bytes": -64}, {"value_bytes": 1 << 60}),
        {"more": 1},
    ],
)
def test_what_is_no_state_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    tell = Passage._tell

    def changed(self: Passage, kind: str, **fields: Any) -> None:
        tell(self, kind, **({**fields, **change} if kind == "state" else fields))

    monkeypatch.setattr(Passage, "_tell", changed)
    folder = kept(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.suppress(Refused):
        assert not passed(folder, Stamp(MARK, 1), 99, "sends")
    left = set(tmp_path.rglob("*")).difference(before)
    assert all(Slots(file).stamps() == [] for file in left)
