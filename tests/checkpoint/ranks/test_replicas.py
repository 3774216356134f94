"""Replicas have running statistics of their own, before a checkpoint and after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fleetpipe
from fleetpipe.static import state_dict
from tests.checkpoint.ranks.replicas_worker import everything, of_model, statistics
from tests.checkpoint.test_static import AFTER, Dynamic, Static
from tests.jobs import job
from tests.static.networks import static_mode


def test_each_replica_goes_on_with_its_own_statistics(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = on_ranks(everything, 2, tmp_path)
    for graph in ("dynamic", "static"):
        (mine, same), (theirs, same_there) = (one["replicas"][graph] for one in (first, second))
        assert same, graph
        assert same_there, graph
        assert mine.keys() == theirs.keys()
        assert all(mine[name] != theirs[name] for name in mine), "no test of anything"
    # One process that is no replica takes the first one's.
    with job():
        run = Dynamic()
        fleetpipe.CheckpointManager(tmp_path / "dynamic").restore(**run.objects)
        assert statistics(of_model(run)) == first["replicas"]["dynamic"][0]
    # What two ranks drew for their stages one process draws for both.
    with static_mode():
        other = Static(seed=9, dropout=[0, 1])
        fleetpipe.CheckpointManager(tmp_path / "stages").restore(**other.objects)
        other.train(AFTER)
        state = {name: array.tobytes() for name, array in state_dict().items()}
    assert state == {**first["stages"], **second["stages"]}
