"""Slots and pins: what stays, what goes for the next state, and who may rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpipe.launch.keeping.pins import Pins
from fleetpipe.launch.keeping.slots import Form, Slots, Stamp

FORM = Form(b"of a test", 8, 128, 4)


def put(slots: Slots, stamp: Stamp, *pinned: Stamp) -> None:
    slot = slots.begin(pinned)
    slots.contents(slot)[64:68] = b"%04d" % stamp.step
    slots.end(slot, stamp, 0)


def steps(slots: Slots) -> list[int]:
    return [stamp.step for stamp in slots.stamps()]


def test_what_is_pinned_stays_and_two_slots_take_turns(tmp_path: Path) -> None:
    slots = Slots.create(tmp_path / "rank-0.1", FORM)
    pinned = Stamp(5, 4), Stamp(5, 6)
    for step in range(1, 12):
        put(slots, Stamp(5, step), *pinned)
    assert steps(slots) == [4, 6, 10, 11]
    put(slots, Stamp(5, 12), pinned[1], Stamp(5, 20))
    assert steps(slots) == [6, 10, 11, 12]
    # A state of the same step but another life is another one, and pins nothing.
    for step in range(13, 16):
        put(slots, Stamp(7, step), Stamp(7, 6), Stamp(7, 10))
    assert slots.stamps() == [Stamp(5, 12), Stamp(7, 13), Stamp(7, 14), Stamp(7, 15)]


def test_a_file_says_what_it_is_made_of(tmp_path: Path) -> None:
    made = Slots.create(tmp_path / "rank-0.1", FORM)
    put(made, Stamp(5, 3))
    found = Slots(tmp_path / "rank-0.1")
    assert found.form == made.form == Form(b"of a test", 64, 128, 4)
    slot = found.slot_of(Stamp(5, 3))
    assert slot is not None
    assert bytes(found.contents(slot)[64:68]) == b"0003"
    assert found.slot_of(Stamp(6, 3)) is None
    # One of the same name takes its place; who has opened the old one keeps that.
    assert Slots.create(tmp_path / "rank-0.1", FORM).stamps() == []
    assert found.stamps() == [Stamp(5, 3)]


def test_a_page_of_pins_is_one_for_all_who_open_it(tmp_path: Path) -> None:
    assert Pins.of(tmp_path) is None
    own = Pins(tmp_path)
    own.life = 1 << 47
    theirs = Pins.of(tmp_path)
    assert theirs is not None
    assert (theirs.life, theirs.states) == (1 << 47, [])
    own.set(None, Stamp(1 << 47, 10))
    assert theirs.states == [Stamp(1 << 47, 10)]
    own.set(Stamp(1 << 47, 10), Stamp(1 << 47, 20))
    own.set(None, Stamp(1 << 47, 30))
    assert theirs.states == [Stamp(1 << 47, 10), Stamp(1 << 47, 30)]
    Pins.remove(tmp_path)
    assert Pins.of(tmp_path) is None


@pytest.mark.parametrize("slots", [2, 4])
def test_a_slot_that_is_being_written_is_not_there(tmp_path: Path, slots: int) -> None:
    made = Slots.create(tmp_path / "rank-0.1", FORM._replace(slots=slots))
    for step in range(1, 6):
        put(made, Stamp(5, step))
    made.begin()
    assert steps(Slots(tmp_path / "rank-0.1")) == [*range(6 - slots + 1, 6)]
