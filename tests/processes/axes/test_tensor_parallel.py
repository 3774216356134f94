"""Tensor-parallel layers on two real ranks against the dense layers, over both kinds of groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import Finished

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


@pytest.mark.parametrize("over", ["own", "gloo"])
def test_two_members_are_the_dense_layers(
    launch: Callable[..., Finished], tmp_path: Path, over: str
) -> None:
    launch(WORKER, 2, args=[str(tmp_path), over])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert len(rank["gaps"]) == 58
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in rank["gaps"].items() if not gap < 1e-6}
    assert ranks[0]["bits"] == ranks[1]["bits"]
