"""Captured models with shards of weights, or of the optimizer's state, train as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs import job
from tests.processes.captured import captured_slices_worker

PROOF = (
    "equal in bits: 10 outputs, 27 gradients, 0 buffers; trained 2 steps of 4 micro-batches under "
    "1F1B, evaluated 2 and 3 rows"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with job(2, rows=2):
        return captured_slices_worker.told(["blocks.2"], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("axis", "tolerance"), [("mp", 1e-6), ("sharding", 0.0)])
def test_a_captured_model_trains_to_the_same_numbers(
    on_ranks: Callable[..., Any], tmp_path: Path, alone: Any, axis: str, tolerance: float
) -> None:
    ranks = on_ranks(captured_slices_worker.on_axis, 4, tmp_path, axis)
    for found in ranks:
        # Each rank measures by its own clock, and takes what one of them measured.
        assert found["cut"] == ranks[0]["cut"]
        assert found["proof"] == alone["proof"] == PROOF
        assert found["start"].keys() == alone["start"].keys()
        for name, value in found["start"].items():
            assert np.array_equal(value, alone["start"][name]), name
        # The slices of a product are added up: with them only rounding is the same.
        for what in ("losses", "evaluated"):
            assert np.allclose(found[what], alone[what], rtol=tolerance, atol=0)
        for name, values in found["state"].items():
            assert np.allclose(values, alone["state"][name], rtol=0, atol=10 * tolerance), name
    # An embedding, four blocks of three, and a head; of each slice.
    assert len(list((tmp_path / "layers").glob("layer*"))) == 14 * (2 if axis == "mp" else 1)
