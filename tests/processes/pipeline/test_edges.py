"""Two ranks that are given their own data alone get what one process with all of it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.launching import Finished

WORKER = Path(__file__).with_name("edges_worker.py")


def test_two_ranks_get_what_one_process_gets(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    launch(WORKER, 2, args=[str(tmp_path)])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    launch(WORKER, None, args=[str(tmp_path)])
    alone: dict[str, Any] = json.loads((tmp_path / "rank0.json").read_text())
    # The uses of a tied weight, and replicas, are added up in another order.
    states = {what: alone.pop(what) for what in ("of_a_topology_of_its_own", "of_replicas")}
    moved = np.array([weight for _, weight in alone.pop("of_plain_models")]) - 1
    # Both ranks have the same rows. Fleet averages over replicas, and adds up over segments.
    moved[1] *= 2
    for found in ranks:
        wrapped = found.pop("of_plain_models")
        assert [name for name, _ in wrapped] == ["ShardingParallel", "SegmentParallel"]
        for (_, weight), step in zip(wrapped, moved):
            assert np.allclose(np.array(weight) - 1, step, rtol=1e-4, atol=1e-7)
        for what, state in states.items():
            own = found.pop(what)
            shared = {name for name in state if name.startswith("shared_layers.")}
            assert shared <= own.keys() <= state.keys()
            for name, value in own.items():
                assert np.allclose(value, state[name], rtol=1e-5, atol=1e-7), (what, name)
        assert found == alone
    shapes = [(shape, dtype) for shape, dtype, _, _ in alone["of_losses"]]
    assert shapes == [
        *[([], "paddle.float32"), ([1], "paddle.float64")] * 2,
        ([4], "paddle.float32"),
        ([4], "paddle.float64"),
    ]
    assert alone["of_iterators"][1] == [4, 8, 12]
    assert all(loss[3] for loss in alone["of_losses"])
