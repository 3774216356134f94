"""Mistakes that every rank makes are refused on every rank, at once, and the job goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.pipelines import train
from tests.processes.failures.refusals_worker import everything

PIPELINE = {
    "shared shapes": ("ConfigError", r"layers 0 and 2 of the list[\s\S]*\[6, 6\][\s\S]*\[6, 4\]"),
    "too few layers": ("PartitionError", "1 layers cannot fill 2 stages"),
    "a bad cut": ("PartitionError", "would end before it begins"),
    "no stages": ("ConfigError", "needs num_stages or topology"),
    "other stages": ("ConfigError", "num_stages=3, pp_degree of fleet.init=2"),
    "no pipeline": ("ConfigError", "pp_degree=2 needs a PipelineLayer"),
    "other parameters": ("ConfigError", "built on the wrong parameters"),
    "a bare optimizer": ("ConfigError", "fleet.distributed_optimizer"),
    "no_grad": ("ConfigError", "training needs gradients"),
    "a scaler without a loss": ("ConfigError", "no loss function"),
    "no such loss": ("ConfigError", "no loss function 1"),
    "too few rows": ("ConfigError", "4 x 2 = 8 rows"),
    "no data": ("ConfigError", "was given no (inputs|labels)"),
    "no scheduler": ("ConfigError", "lr_scheduler of train_batch is not an LRScheduler"),
    "no scaler": ("ConfigError", "scaler of train_batch is not a GradScaler"),
    "a class": ("ConfigError", r"LayerDesc\(ReLU, \.\.\)"),
    "wrapped twice": ("ConfigError", "wrapped already"),
    "no folder": ("CheckpointError", "no such folder"),
}
SLICES = {
    "heads": ("ConfigError", r"`out_features` \(=15\) must be divisible"),
    "the heads' outputs": ("ConfigError", r"`in_features` \(=15\) must be divisible"),
    "vocabulary": ("ConfigError", r"`num_embeddings` \(=11\) must be divisible"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the two ranks once, when the first test asks for what they return."""
    found: list[Any] = []

    def run(on_ranks: Callable[..., Any]) -> list[Any]:
        if not found:
            found.extend(on_ranks(everything, 2, tmp_path_factory.mktemp("refusals")))
        return found

    return run


@pytest.mark.parametrize(
    ("part", "expected"), [("in_a_pipeline", PIPELINE), ("with_slices", SLICES)]
)
def test_each_rank_refuses_before_it_waits_and_trains_afterwards(
    on_ranks: Callable[..., Any], ranks: Any, part: str, expected: dict[str, tuple[str, str]]
) -> None:
    both = [found[part] for found in ranks(on_ranks)]
    for found in both:
        assert found["refused"].keys() == expected.keys()
        for name, (kind, message) in expected.items():
            told, text = found["refused"][name]
            assert told == kind, (name, text)
            assert re.search(message, text), text
    assert both[0]["losses"] == both[1]["losses"]
    if part == "in_a_pipeline":
        assert both[0]["losses"] == train(steps=3).losses


def test_mixed_dtypes_at_a_boundary_end_the_batch_on_both_ranks_at_once(
    on_ranks: Callable[..., Any], ranks: Any
) -> None:
    both = [found["at_a_boundary"] for found in ranks(on_ranks)]
    (kind, text), (own_kind, own_text) = (f["refused"]["mixed dtypes"] for f in both)
    assert own_kind == "BoundaryError"
    assert "layer 1 (Half) cannot take what layer 0 returned" in own_text
    assert "float32[2, 8], from layer 0 (Linear)" in own_text
    assert kind == "PeerFailed"
    assert "rank 1 raised: BoundaryError: layer 1 (Half) cannot take" in text
    assert both[0]["losses"] == both[1]["losses"] == train(steps=3).losses
