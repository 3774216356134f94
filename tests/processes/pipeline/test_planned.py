"""Ranks that measured their own layers alone have one profile, one plan, and train by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fleetpipe.profiling import PipelinePlan, Profile
from tests.launching import Finished
from tests.pipelines import mlp_layers

WORKER = Path(__file__).with_name("planned_worker.py")


def test_two_ranks_profile_plan_and_train(launch: Callable[..., Finished], tmp_path: Path) -> None:
    launch(WORKER, 2, args=[str(tmp_path)])
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2))
    assert first == second
    profile, plan = Profile.loads(first["profile"]), PipelinePlan.loads(first["plan"])
    assert len(profile.layers) == len(mlp_layers())
    assert profile.splits
    assert all(layer.forward > 0 for layer in profile.layers)
    assert [layer.parameters > 0 for layer in profile.layers] == [True, False] * 3 + [True]
    assert profile.loss is not None
    assert plan.ranks == 2
    plain, planned = first["losses"]
    assert plain == planned
