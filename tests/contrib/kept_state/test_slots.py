"""Slots: what stays, what goes for the next state, and what a file says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpipe.contrib.kept_state.slots import SlotForm, Slots

pytestmark = pytest.mark.no_paddle

FORM = SlotForm(b"of a test", 8, 128, 4)


def put(slots: Slots, step: int) -> None:
    slot = slots.begin()
    slots.contents(slot)[64:68] = b"%04d" % step
    slots.end(slot, step, 0)


def test_a_file_says_what_it_is_made_of(tmp_path: Path) -> None:
    made = Slots.create(tmp_path / "rank-0.1", FORM)
    put(made, 3)
    found = Slots(tmp_path / "rank-0.1")
    assert found.form == made.form == SlotForm(b"of a test", 64, 128, 4)
    slot = found.slot_of(3)
    assert slot is not None
    assert bytes(found.contents(slot)[64:68]) == b"0003"
    assert found.slot_of(2) is None
    # One of the same name takes its place; who has opened the old one keeps that.
    assert Slots.create(tmp_path / "rank-0.1", FORM).steps() == []
    assert found.steps() == [3]


@pytest.mark.parametrize("slots", [2, 4])
def test_a_slot_that_is_being_written_is_not_there(tmp_path: Path, slots: int) -> None:
    made = Slots.create(tmp_path / "rank-0.1", FORM._replace(slots=slots))
    for step in range(1, 6):
        put(made, step)
    assert made.steps() == [*range(6 - slots, 6)]
    made.begin()
    assert Slots(tmp_path / "rank-0.1").steps() == [*range(6 - slots + 1, 6)]
