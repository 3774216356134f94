"""Tensor-parallel layers on two real ranks against the dense layers, over both kinds of groups."""

from __future__ import annotations

import pytest

from tests.fixtures import Call
from tests.processes.axes.tensor_parallel_worker import compared


@pytest.mark.parametrize("over", ["own", "gloo"])
def test_two_members_are_the_dense_layers(on_ranks: Call, over: str) -> None:
    (gaps, bits), (other_gaps, other_bits) = on_ranks(compared, 2, over)
    for found in (gaps, other_gaps):
        assert len(found) == 58
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in found.items() if not gap < 1e-6}
    assert bits == other_bits
