"""A fused forward and backward whose exchanges travel while the other computes."""

from __future__ import annotations

import pytest

from fleetpipe.paddle_api import VERSION
from tests.fixtures import Call
from tests.processes.pipeline import overlap_worker as cases

pytestmark = pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 has no ep_degree")


def test_the_bits_are_those_of_halves_one_after_the_other(on_ranks: Call) -> None:
    """With dropout, casts, recompute, and a layer that is in both stages of a rank."""
    runs = [(overlap, *how) for how in (("keyed", 0), ("fleet", 1)) for overlap in (False, True)]
    for found in on_ranks(cases.each, 4, runs, timeout=240):
        for apart, together in zip(found[::2], found[1::2]):
            assert together["numbers"] == apart["numbers"]
            assert apart["handed"] == 0
            assert together["handed"] > 0
            assert together["passed"], together["verdict"]


@pytest.mark.parametrize("how", ["backward", "dies"])
def test_an_expert_that_fails_ends_both_halves(on_ranks: Call, how: str) -> None:
    messages = on_ranks(cases.fails, 4, how, check=False)
    own = messages.pop()
    if how == "dies":
        assert own is None
    else:
        assert "an expert failed" in own
        assert "raised at rank 1, operation (F" in own
    for message in messages:
        assert "rank 3" in message, message
    # The one that exchanges tokens with it.
    assert "operation (F" in messages[2]
