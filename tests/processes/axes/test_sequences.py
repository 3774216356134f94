"""Four ranks that split sequences, beside a pipeline, are the plain model on whole sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.launching import Finished

WORKER = Path(__file__).with_name("sequences_worker.py")
CASES = ("mp", "mp, split backward", "mp, Paddle's classes")


def test_split_sequences_are_the_plain_model(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    """Packed documents, labels that do not count, losses, gradients, parameters of three steps."""
    launch(WORKER, 4, args=[str(tmp_path), *CASES], timeout=180)
    results = json.loads((tmp_path / "gaps.json").read_text())
    assert set(results) == set(CASES)
    for case, steps in results.items():
        for gaps in steps:
            # Not max: it would pass over NaN.
            assert not {name: gap for name, gap in gaps.items() if not gap < 1e-5}, case
