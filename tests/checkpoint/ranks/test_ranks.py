"""Ranks that hold slices, shards, replicas and tied weights, and one process, read each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import StateError
from tests.checkpoint.ranks.ranks_worker import LAYOUTS
from tests.launching import Finished

WORKER = Path(__file__).with_name("ranks_worker.py")
OF_TWO = [name for name in LAYOUTS if name != "alone"]
#: Layouts in which all sums have the same order; the others agree to rounding.
SAME_ORDER = {"alone", "pp", "zbv"}


def test_each_layout_reads_each(launch: Callable[..., Finished], tmp_path: Path) -> None:
    for mode in ("write", "read"):
        launch(WORKER, 2, args=[str(tmp_path), mode, *OF_TWO])
        launch(WORKER, None, args=[str(tmp_path), mode, "alone"])

    def told(mode: str, names: list[str], rank: int) -> dict[str, object]:
        path = tmp_path / f"{mode}-{'-'.join(names)}-{rank}.json"
        found: dict[str, object] = json.loads(path.read_text())
        return found

    losses = {**told("write", OF_TWO, 0), **told("write", ["alone"], 0)}
    read = {**told("read", OF_TWO, 0), **told("read", ["alone"], 0)}
    assert read.keys() == {f"{one} from {other}" for one in LAYOUTS for other in LAYOUTS}
    assert told("read", OF_TWO, 1) == told("read", OF_TWO, 0)
    for pair, (same_files, loss) in read.items():
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
