"""Jobs whose layers are cut: without and with a pipeline, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.fixtures import Call
from tests.processes.pipeline.slices_worker import lost, odd, plain


def test_a_model_that_is_no_pipeline_trains_on_two_axes(on_ranks: Call) -> None:
    (single,) = on_ranks(plain, None)
    ranks = on_ranks(plain, 4)
    # The loss of a replica is that of its own rows.
    whole = np.mean([ranks[0]["losses"], ranks[2]["losses"]], axis=0)
    assert np.allclose(whole, single["losses"], rtol=1e-5)
    for found in ranks:
        # Paddle's own init loses the seed that the user set before it.
        assert found["drawn"] == single["drawn"]
        assert found["state"].keys() == {f"_layers.{name}" for name in single["state"]}
        for name, expected in single["state"].items():
            value = found["state"][f"_layers.{name}"]
            scale = np.abs(expected).max()
            assert np.allclose(value, expected, rtol=0, atol=1e-4 * scale), name
        assert np.allclose(found["logits"], single["logits"], rtol=0, atol=1e-4)
    assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]


def test_a_pipeline_of_slices_has_parity_and_whole_state(on_ranks: Call, tmp_path: Path) -> None:
    refusals, ranks = zip(*on_ranks(odd, 4, tmp_path))
    for message in refusals:
        assert "`out_features` (=7) must be divisible" in message
    for found in ranks:
        assert found["passed"], found["verdict"]
        assert found["tolerance"] == 1e-5
        assert found["same"]
        assert found["shapes"] == found["slots"]
        assert found["shapes"]["0.weight"] == [12, 6]
        assert found["shapes"]["2.weight"] == [6, 24]
        assert found["shapes"]["5.weight"] == [6, 12]
        assert found["reread"]
        assert found["files"] == [
            f"layer_{layer:02d}-tensor_{member:02d}-model_states.pdparams"
            for layer in range(6)
            for member in range(2)
        ]
        # Whole parameters are the same on all members to the last bit.
        assert found["bits"] == ranks[0]["bits"]
    streams = [found["streams"] for found in ranks if found["streams"]]
    assert len(streams) == 2
    assert streams[0]["global_seed"] == streams[1]["global_seed"]
    assert all(a != b for a, b in zip(streams[0]["local_seed"], streams[1]["local_seed"]))
    masks = [str(mask) for mask in streams[0]["global_seed"]]
    assert len(masks) == len(set(masks)) == 3 * 2


def test_a_member_that_fails_in_backward_reaches_the_other(on_ranks: Call) -> None:
    error, failed = on_ranks(lost, 2, check=False)
    assert failed is None
    kind, message = error
    assert kind == "PeerFailed"
    assert "this gradient is no good" in message
