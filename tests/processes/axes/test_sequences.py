"""Four ranks that split sequences, beside a pipeline: parity, checkpoints, profiles and traces.

That they are plain Paddle on whole sequences is in ``combinations``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.paddle_api import VERSION
from fleetpipe.profiling import Profile
from tests.processes.axes.sequences_worker import (
    LENGTH,
    ROWS,
    WIDTH,
    through_layouts,
    verdicts,
)


def test_parity_joins_the_parts_of_sequences(on_ranks: Callable[..., Any]) -> None:
    tokens = {"loss_reduction": "tokens"}
    cases: list[Any] = [
        ("parts", {"pp": 2, "sep": 2}, {}),
        ("parts", {"pp": 2, "cp": 2}, tokens),
        ("parts", {"dp": 2, "sep": 2}, tokens),
        ("members of parts", {"mp": 2, "cp": 2}, {}),
    ]
    cases = [case for case in cases if not VERSION.startswith("2.") or "cp" not in case[1]]
    for found in on_ranks(verdicts, 4, [*cases, ("apart", {"pp": 2, "sep": 2}, {})], timeout=240):
        for case, (verdict, first) in zip(cases, found):
            assert "equal within 1e-05" in verdict, (case, verdict, first)
        verdict, first = found[-1]
        assert "FAILED" in verdict
        assert "quantity='output', name='1." in first


@pytest.mark.once
def test_checkpoints_and_traces_of_split_sequences(
    on_ranks: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = {"pp": 2, "sep": 2}
    layouts = [split, {"pp": 4}, split]
    legs = on_ranks(through_layouts, 4, tmp_path / "a", layouts, timeout=240)[0]
    for (_, _, saved, _), (_, restored, _, _) in itertools.pairwise(legs):
        assert restored == saved
    # Half of queries, keys, values and outputs, forward and backward, in float32.
    half = ROWS * LENGTH // 2 * WIDTH // 2 * 4
    parts, whole = (Profile.loads(leg[3]) for leg in legs[:2])
    assert [layer.exchanged for layer in parts.layers] == [0, 8 * half, 8 * half, 0]
    assert [layer.exchanged for layer in whole.layers] == [0] * 4
    # What one of whole sequences says of split ones.
    priced = whole.with_degrees(*parts.degrees)
    for name in ("exchanges", "exchanged", "queries", "keys", "parameters"):
        assert [getattr(one, name) for one in priced.layers] == [
            getattr(one, name) for one in parts.layers
        ]
    alone = through_layouts(tmp_path / "b", [{"pp": 4}] * 3)
    assert [leg[0] for leg in legs] == pytest.approx([leg[0] for leg in alone], rel=1e-5)
    traces = [(tmp_path / "a" / f"trace{step}" / "trace.json").read_text() for step in (0, 1)]
    assert ['"exchange"' in trace for trace in traces] == [True, False]
    assert main(["why", str(tmp_path / "a" / "trace0")]) == 0
    assert "steps" in capsys.readouterr().out
