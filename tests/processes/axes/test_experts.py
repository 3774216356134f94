"""Experts spread over ranks: the single model's numbers, checkpoints of any layout, failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleetpipe.paddle_api import VERSION
from tests.fixtures import Call
from tests.processes.axes import experts_worker as cases

pytestmark = pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 has no ep_degree")
SPREAD = {"pp": 2, "sharding": 2, "ep": 2}


def test_the_single_model_beside_spread_experts(on_ranks: Call) -> None:
    """With one micro-batch sums have one order: all bits; with two those of experts have not."""
    runs = [
        (cases.Routed, 1, "ZBV", SPREAD),
        (cases.Routed, 2, "1F1B", SPREAD),
        (cases.Stock, 2, "1F1B", {"pp": 2, "dp": 2, "ep": 2}),
        (cases.Routed, 1, "1F1B", {"pp": 2, "mp": 2, "ep": 2}),
        (cases.Routed, 1, "1F1B", {**SPREAD, "sharding_stage": 2}),
    ]
    found, refusals = zip(*on_ranks(cases.beside_each, 4, runs, timeout=240))
    for message in refusals:
        assert "3 experts cannot be spread over 2 ranks" in message
        assert "a multiple of 2, say 4" in message
    for exact, several, stock, members, scattered in found:
        assert "bit-exact" in scattered["verdict"], scattered["verdict"]
        assert "bit-exact" in exact["verdict"], exact["verdict"]
        assert members["passed"], members["verdict"]
        assert several["passed"], several["verdict"]
        assert stock["passed"], stock["verdict"]
    # Every rank has half of the experts and their state; each parameter's state is on one rank.
    names = [name for rank in found for name in rank[0]["names"]]
    assert len(names) == len(set(names)) == 3 * 4 * cases.EXPERTS
    assert {len(rank[0]["names"]) for rank in found} == {4 * 2, 8 * 2}


def test_checkpoints_know_experts_by_their_numbers(on_ranks: Call, tmp_path: Path) -> None:
    layouts = [(1, SPREAD), (1, {"pp": 2, "sharding": 2}), (2, {"pp": 4}), (1, SPREAD)]
    legs = on_ranks(cases.through_layouts, 4, tmp_path / "run", layouts, timeout=240)[0]
    for (_, _, saved), (_, restored, _) in zip(legs, legs[1:]):
        assert list(saved) == list(restored)
        for name, value in saved.items():
            np.testing.assert_array_equal(restored[name], value, err_msg=name)
    alone = cases.through_layouts(tmp_path / "other", [(2, {"pp": 4})] * 4)
    np.testing.assert_allclose([leg[0] for leg in legs], [leg[0] for leg in alone], rtol=1e-5)


def test_a_rank_that_dies_within_an_exchange_is_named(on_ranks: Call) -> None:
    messages = on_ranks(cases.one_dies, 4, SPREAD, check=False)
    assert messages.pop() is None
    for message in messages:
        assert "rank 3" in message, message


def test_a_rank_whose_experts_get_no_token_of_data(on_ranks: Call) -> None:
    """Data need no gradient: that rank came by no exchange in backward, and the other waited."""
    first, second = on_ranks(cases.without_tokens, 2, {"dp": 2, "ep": 2})
    assert first == second
