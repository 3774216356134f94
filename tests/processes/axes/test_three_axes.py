"""Eight ranks, dp 2 x mp 2 x pp 2, of a tiny GPT are the single model, under three schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.launching import Finished

WORKER = Path(__file__).with_name("three_axes_worker.py")
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBH1")


@pytest.mark.timeout(400)
def test_three_axes_are_the_single_model(launch: Callable[..., Finished], tmp_path: Path) -> None:
    """With a tied embedding, dropout, recompute, AdamW and a clip by the global norm."""
    for folder in ("single", "ranks"):
        (tmp_path / folder).mkdir()
    launch(WORKER, None, args=[str(tmp_path / "single"), "1", "1", "1", "1F1B"])
    launch(WORKER, 8, args=[str(tmp_path / "ranks"), "2", "2", "2", *SCHEDULES], timeout=240)
    single = np.load(tmp_path / "single" / "1F1B.npz")
    # The clip was at work, and training went somewhere.
    assert (single["norms"] > 0.5).all()
    for schedule in SCHEDULES:
        ranks = np.load(tmp_path / "ranks" / f"{schedule}.npz")
        assert set(ranks.files) == set(single.files)
        gaps = {name: _gap(ranks[name], single[name]) for name in single.files}
        # Not max: it would pass over NaN.
        assert not {name: gap for name, gap in gaps.items() if not gap < 1e-5}, schedule


def _gap(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
