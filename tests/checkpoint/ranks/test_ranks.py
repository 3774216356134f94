"""Ranks that hold slices, shards, replicas and tied weights, and one process, read each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import StateError
from tests.checkpoint.ranks.ranks_worker import LAYOUTS, read, write

OF_TWO = [name for name in LAYOUTS if name != "alone"]
#: Layouts in which all sums have the same order; the others agree to rounding.
SAME_ORDER = {"alone", "pp", "zbv"}


def test_each_layout_reads_each(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    written, *_ = on_ranks(write, 2, tmp_path, OF_TWO)
    losses = {**written, **write(tmp_path, ["alone"])}
    first, second = on_ranks(read, 2, tmp_path, OF_TWO)
    assert first == second
    found = {**first, **read(tmp_path, ["alone"])}
    assert found.keys() == {f"{one} from {other}" for one in LAYOUTS for other in LAYOUTS}
    for pair, (same_files, loss) in found.items():
        reader, writer = pair.split(" from ")
        assert same_files, pair
        if {reader, writer} <= SAME_ORDER or reader == writer:
            assert loss == losses[writer], pair
        else:
            assert abs(loss - losses[writer]) < 1e-5, pair


def test_launched_processes_need_a_job_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match="do not know each other yet"):
        Ranks.of_job()
