"""Agreement of all ranks before the first step, its ranks played by threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fleetpipe.errors import ConfigError, PipelineTimeout
from fleetpipe.job.agreement import facts, require_agreement
from tests.fixtures import Patch
from tests.job.test_meeting import MemoryStore, play

FACTS = {"schedule": "1F1B", "layers": "Linear(2, 3)", "OMP_NUM_THREADS": "1"}


def agree(monkeypatch: Patch, changes: dict[int, dict[str, str]], ranks: int = 3) -> dict[int, Any]:
    store = MemoryStore()

    def act(rank: int) -> None:
        time.sleep(0.02 * rank)
        require_agreement(store, "first", {**FACTS, **changes.get(rank, {})}, 5)

    return play(monkeypatch, ranks, act)


def test_ranks_that_say_the_same_go_on(monkeypatch: Patch) -> None:
    assert agree(monkeypatch, {}) == {0: None, 1: None, 2: None}


def test_ranks_that_agree_meet_once(monkeypatch: Patch) -> None:
    store = MemoryStore()
    play(monkeypatch, 2, lambda _: require_agreement(store, "first", FACTS, 5))
    assert {key for key in store.counts if key.endswith(("/0", "/1"))} == {
        "first/published/0",
        "first/published/1",
    }


def test_the_folder_of_a_trace_is_no_fact() -> None:
    @dataclass
    class Options:
        trace: str | None
        timeout: float = 5.0

    near, far, none = (facts(Options(folder)) for folder in ("/near", "/far", None))
    assert near == far != none
    assert near["timeout"] == "5.0"


def test_every_rank_raises_the_same_with_both_sides(monkeypatch: Patch) -> None:
    raised = agree(monkeypatch, {1: {"schedule": "FThenB", "extra": "5"}})
    assert {type(error) for error in raised.values()} == {ConfigError}
    assert len({str(error) for error in raised.values()}) == 1
    text = str(raised[2])
    assert "ranks 0 and 1 of the job do not run the same\n" in text
    assert "as on rank 0: schedule = 1F1B; extra = nothing" in text
    assert "on rank 1: schedule = FThenB; extra = 5" in text
    assert "Linear" not in text


def test_others_that_differ_are_named_too(monkeypatch: Patch) -> None:
    raised = agree(monkeypatch, {2: {"schedule": "FThenB"}, 3: {"schedule": "ZBH1"}}, ranks=4)
    assert "ranks 0 and 2 of the job do not run the same (nor do ranks [3])" in str(raised[0])


def test_many_differences_are_cut_short(monkeypatch: Patch) -> None:
    raised = agree(monkeypatch, {1: {f"layer {i}": "other" for i in range(9)}})
    assert "layer 3 = other; .." in str(raised[0])
    assert "layer 4" not in str(raised[0])


def test_a_rank_that_does_not_come_is_not_said_to_be_missing_from_the_start(
    monkeypatch: Patch,
) -> None:
    store = MemoryStore()
    raised = play(
        monkeypatch, 2, lambda _: require_agreement(store, "first", FACTS, 0.05), only=(0,)
    )
    assert isinstance(raised[0], PipelineTimeout)
    assert str(raised[0]).startswith("rank 1 did not come to the comparison of what each rank runs")
    assert "fleet.init" not in str(raised[0])
