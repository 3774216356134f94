"""Ranks that have a part of a captured model each get what one process with all of it gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import byhand
from tests.processes.captured.captured_worker import everything


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    # In a process of its own, for the peak of its memory.
    (found,) = byhand.call(everything, None, folder, 1, folder=folder)
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_get_what_one_process_gets(
    on_ranks: Callable[..., Any], tmp_path: Path, alone: Any, dp: int
) -> None:
    ranks = on_ranks(everything, 2 * dp, tmp_path, dp)
    for found in ranks:
        assert found["resnet18"]["reloaded"]
        assert found["tied"]["reloaded"]
        # Each has the parameters and statistics of its stage, by the names of the plain model.
        own = found["resnet18"].pop("own")
        assert len(own) in (50, 52)
        assert own.items() <= alone["resnet18"]["own"].items()
        expected = alone["resnet18"].items()
        assert found["resnet18"] == {key: value for key, value in expected if key != "own"}
    lazy, whole = [found["lazily"] for found in ranks], alone["lazily"]
    assert whole["proof"].startswith("equal in bits: 10 outputs, 24 gradients, 0 buffers")
    for part in lazy:
        # The first values do not depend on who draws them.
        assert (part["losses"], part["predicted"]) == (whole["losses"], whole["predicted"])
        assert len(part["own"]) == 12
        assert part["own"].items() <= whole["own"].items()
        # Replicas need as much again as the gradients, to add them up.
        assert part["peak"] <= (0.6 if dp == 1 else 0.75) * whole["peak"]
        assert part["proof"] is None
    tied = [found["tied"] for found in ranks]
    assert [len(found["own"]) for found in tied] == [10, 3] * dp
    # Each stage adds up its own uses of the weight first: the copies are equal, to rounding alone.
    assert len({found["own"]["embed.weight"] for found in tied}) == 1
    for found in tied:
        assert found["losses"] == pytest.approx(alone["tied"]["losses"], rel=1e-6)
        assert found["losses"][0] == alone["tied"]["losses"][0]
        assert found["edges"] == ["0>1"]
