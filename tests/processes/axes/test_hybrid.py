"""Jobs of several degrees, and tensor-parallel layers, on real ranks beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures import Call
from tests.processes.axes import hybrid_worker as cases
from tests.processes.axes.tensor_parallel_worker import compared


def launched(on_ranks: Call, ranks: int, *chosen: Callable[[], Any]) -> dict[str, list[Any]]:
    """Runs cases one after another; returns by case what each rank finds."""
    found = on_ranks(cases.run, ranks, *chosen, timeout=240)
    return {case.__name__: [rank[case.__name__] for rank in found] for case in chosen}


def assert_close(ranks: list[Any], tolerance: float = 1e-6) -> None:
    """The single model's norms and parameters; the same bits on every rank."""
    for rank in ranks:
        assert rank["bits"] == ranks[0]["bits"]
        assert rank["norms"] == ranks[0]["norms"]
        assert rank["gap"] < tolerance
        for ours, theirs in rank["norms"]:
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_stages_replicas_and_the_norm_of_all(on_ranks: Call) -> None:
    training = (cases.four_stages, cases.tied_weights, cases.two_chunks)
    others = (cases.overflow, cases.trained_loss, cases.parity_with_clip)
    found = launched(on_ranks, 4, *training, *others)
    assert_close(found["four_stages"])
    assert [rank["equal"] for rank in found["four_stages"]] == [True] * 4
    # A weight that three stages share: its gradient is a sum in another order, no more.
    assert_close(found["tied_weights"])
    assert_close(found["two_chunks"])
    for rank in found["overflow"]:
        assert rank["moved"] == [True, False, True, True]
        assert rank["states"] == [[256.0, 1], [128.0, 0], [128.0, 1], [256.0, 0]]
    owners = [rank for rank in found["trained_loss"] if rank["last"]]
    for rank in owners:
        assert (rank["first"], rank["scale"]) == (owners[0]["first"], owners[0]["scale"])
        assert rank["scale"] != rank["first"]
        assert rank["scale"] == pytest.approx(rank["expected"], rel=1e-5)
    for passed, verdict in found["parity_with_clip"]:
        assert passed, verdict


def test_ranks_that_share_the_optimizers_state(on_ranks: Call) -> None:
    training = (cases.sharded, cases.sharded_groups, cases.sharded_alone)
    training += (cases.plain_model, cases.plain_replicas)
    found = launched(on_ranks, 4, *training, cases.different_clips)
    for message in found["different_clips"]:
        assert "ranks 0 and 3 of the job do not run the same" in message
        assert "global_norm=2.0" in message
    for case in training:
        assert_close(found[case.__name__])
    first = found["sharded"][0]
    # pp 2 x sharding 2: the four ranks have one state for each parameter of the model.
    for case in ("sharded", "sharded_groups"):
        counts = [rank["moments"] for rank in found[case]]
        assert sum(counts) == first["parameters"]
        assert min(counts) > 0
    # dp 2 x sharding 2: each replica in dp has a whole one.
    assert sum(rank["moments"] for rank in found["sharded_alone"]) == 2 * first["parameters"]
    assert [rank["moments"] for rank in found["plain_model"]] in ([1, 3, 1, 3], [3, 1, 3, 1])


@pytest.mark.parametrize("over", ["own", "gloo"])
def test_two_members_are_the_dense_layers(on_ranks: Call, over: str) -> None:
    (gaps, bits), (other_gaps, other_bits) = on_ranks(compared, 2, over)
    for found in (gaps, other_gaps):
        assert len(found) == 58
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in found.items() if not gap < 1e-6}
    assert bits == other_bits
