"""The slots of a segment: what is there whole after any end of the process that writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fleetpipe.contrib.kept_state import Segment
from fleetpipe.errors import CheckpointError
from tests.fixtures import Patch

pytestmark = pytest.mark.once

SIZES = [5, 0, 64, 1000]


def blocks(step: int) -> list[memoryview]:
    return [memoryview(bytes([(step + number) % 256] * size)) for number, size in enumerate(SIZES)]


def test_the_last_two_steps_are_there_for_whoever_opens_it(tmp_path: Path) -> None:
    own = Segment.create(tmp_path / "rank-0", {"names": ["a"]}, SIZES, 10)
    assert own.steps() == []
    for step in range(4):
        own.write(step, blocks(step), f"step {step}".encode())
    other = Segment(tmp_path / "rank-0")
    assert other.index == {"names": ["a"]}
    assert other.steps() == [2, 3]
    for step in (2, 3):
        found, text = other.read(step)
        assert [bytes(block) for block in found] == [bytes(block) for block in blocks(step)]
        assert text == f"step {step}".encode()
    # One of the same name takes its place; who has opened the old one keeps that.
    assert Segment.create(tmp_path / "rank-0", None, SIZES, 10).steps() == []
    assert other.steps() == [2, 3]


@pytest.mark.parametrize("block", range(len(SIZES)))
def test_a_step_that_was_not_finished_is_not_there(tmp_path: Path, block: int) -> None:
    own = Segment.create(tmp_path / "rank-0", None, SIZES, 10)
    for step in range(3):
        own.write(step, blocks(step), b"")

    broken = [*blocks(3)[:block], memoryview(b"of another size" * 99)]
    with pytest.raises(ValueError, match="could not broadcast"):
        own.write(3, broken, b"")
    other = Segment(tmp_path / "rank-0")
    assert other.steps() == [2]
    assert [*map(bytes, other.read(2)[0])] == [*map(bytes, blocks(2))]
    other.write(3, blocks(3), b"")
    assert other.steps() == [2, 3]


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "give the host more shared memory"), (errno.EFBIG, "raise that limit")],
)
def test_a_host_without_so_much_memory_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: Patch, number: int, fix: str
) -> None:
    def full(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="does not fit into") as raised:
        Segment.create(tmp_path / "rank-0", None, [1 << 40], 10)
    assert f"{2 * ((1 << 40) + 2 * 64) + 64} bytes for 2 steps" in str(raised.value)
    assert fix in str(raised.value)
    assert raised.value.permanent


def test_a_text_may_be_as_long_as_was_said(tmp_path: Path) -> None:
    own = Segment.create(tmp_path / "rank-0", None, [], 128)
    assert (own.takes(b"x" * 128), own.takes(b"x" * 129)) == (True, False)
