"""Stage 2 of a sharded optimizer on real ranks: the bits of stage 1, and of plain Paddle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import Call
from tests.processes.axes import sharding_worker as cases
from tests.processes.axes.sharding_worker import Case

BESIDE = {"pp": 2, "sharding": 2}


def assert_as_stage_1(on_ranks: Call, chosen: list[Case]) -> None:
    found = on_ranks(cases.both_stages, 4, chosen, timeout=240)
    for number, case in enumerate(chosen):
        ranks = [rank[number] for rank in found]
        for first, second in ranks:
            replicas = case.degrees.get("dp", 1) * case.degrees["sharding"]
            assert second["ends"][2] == ranks[0][1]["ends"][2], case
            if replicas == 2:  # of more, Gloo has another order than the ranks'
                assert second["ends"] == first["ends"], case
                assert second["equal"] or case.model == "tied", case
            assert second["gap"] < 1e-6, (case, second["gap"])
            assert [here for here, _ in second["nbytes"]] == [own for _, own in second["nbytes"]]
            assert all(here > own for here, own in first["nbytes"])


def test_gradients_are_scattered_to_their_owners(on_ranks: Call) -> None:
    chosen = [
        Case(BESIDE),
        Case(BESIDE, "tied", optimizer="groups", apart=True),
        Case(BESIDE, "gpt", "ZBH1", "momentum", scaled=True),
        Case({"dp": 2, "sharding": 2}, "gpt", optimizer="momentum"),
        Case(BESIDE, optimizer="muon"),
    ]
    assert_as_stage_1(on_ranks, chosen)


@pytest.mark.parametrize("first", [0])
def test_random_jobs(on_ranks: Call, first: int) -> None:
    assert_as_stage_1(on_ranks, [cases.drawn(seed) for seed in range(first, first + 4)])


def test_a_batch_does_not_add_to_scattered_gradients(on_ranks: Call) -> None:
    for message in on_ranks(cases.left_over, 4, timeout=120):
        assert "stage 2 has added up the gradients" in message


def test_checkpoints_and_parity(on_ranks: Call, tmp_path: Path) -> None:
    layouts = [(2, BESIDE), (1, BESIDE), (1, {"pp": 4}), (2, BESIDE)]
    legs = on_ranks(cases.through_layouts, 4, tmp_path / "stages", layouts, timeout=240)
    plain = [(1, BESIDE)] * 2 + layouts[2:3] + [(1, BESIDE)]
    again = on_ranks(cases.through_layouts, 4, tmp_path / "stage 1", plain, timeout=240)
    assert legs == again
    for passed, verdict in on_ranks(cases.verdict, 4, timeout=240):
        assert passed, verdict
        assert "within" in verdict or "bit-exact" in verdict


def test_a_captured_model_is_compared_with_scattered_gradients(on_ranks: Call) -> None:
    for first, second in on_ranks(cases.captured_in_both, 4, timeout=120):
        assert first == second
