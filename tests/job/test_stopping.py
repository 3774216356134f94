"""Ranks that agree on a step to stop after: all at the same one, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe.launch.resume import Stopping
from fleetpipe.mesh.groups import DirectGroup, SoleGroup
from fleetpipe.transport import MemoryHub, MemoryTransport, MessageKey


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("in_step", [0, 1, 3])
def test_all_ranks_stop_after_the_step_behind_the_one_in_which_one_was_asked(
    ranks: int, asked: int, in_step: int
) -> None:
    hub = MemoryHub(ranks)
    agreements = []
    for rank in range(ranks):
        # Each rank is a process: all count its agreements alike.
        agreement = Stopping(DirectGroup(hub.endpoint(rank), 1), 1)
        agreement._name = "stop"
        agreements.append(agreement)
    for step in range(6):
        if step == in_step:
            agreements[asked].ask()
        answers = [agreement.agree() for agreement in agreements]
        assert answers == [step > in_step] * ranks


def test_messages_of_later_steps_have_the_keys_of_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub, keys = MemoryHub(2), set()
    first, second = (Stopping(DirectGroup(hub.endpoint(rank), 1), 1) for rank in range(2))
    second._name = first._name
    send = MemoryTransport.send

    def noted(transport: MemoryTransport, peer: int, key: MessageKey, value: Any) -> None:
        keys.add(key)
        send(transport, peer, key, value)

    monkeypatch.setattr(MemoryTransport, "send", noted)
    for _ in range(10):
        assert not first.agree()
        assert not second.agree()
    assert len(keys) <= 2, "a transport keeps what it knows of each: memory grows"


def test_one_process_stops_after_the_step_that_it_row_of() -> None:
    agreement = Stopping(SoleGroup(), 1)
    assert not agreement.agree()
    agreement.ask()
    assert agreement.agree()
