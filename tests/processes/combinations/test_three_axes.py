"""Eight ranks, dp 2 x mp 2 x pp 2, of a tiny GPT are the single model, under three schedules."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixtures import Call
from tests.processes.combinations.three_axes_worker import train

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBH1")


@pytest.mark.timeout(400)
def test_three_axes_are_the_single_model(on_ranks: Call) -> None:
    """With a tied embedding, dropout, recompute, AdamW and a clip by the global norm."""
    (single,) = train({"dp": 1, "mp": 1, "pp": 1}, ("1F1B",))
    first, *_ = on_ranks(train, 8, {"dp": 2, "mp": 2, "pp": 2}, SCHEDULES, timeout=240)
    # The clip was at work, and training went somewhere.
    assert (single["norms"] > 0.5).all()
    for schedule, ranks in zip(SCHEDULES, first):
        assert ranks.keys() == single.keys()
        gaps = {name: _gap(ranks[name], single[name]) for name in single}
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in gaps.items() if not gap < 1e-5}, schedule


def _gap(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
