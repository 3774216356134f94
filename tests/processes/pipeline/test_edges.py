"""Two ranks that are given their own data alone get what one process with all of it gets."""

from __future__ import annotations

import numpy as np

from tests.fixtures import Call
from tests.processes.pipeline.edges_worker import everything


def test_two_ranks_get_what_one_process_gets(on_ranks: Call) -> None:
    ranks = on_ranks(everything, 2)
    (alone,) = on_ranks(everything, None)
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
