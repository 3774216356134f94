"""Replicas have running statistics of their own, before a checkpoint and after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fleetpipe
from fleetpipe.static import state_dict
from tests.checkpoint.ranks.replicas_worker import of_model, statistics
from tests.checkpoint.test_static import AFTER, Dynamic, Static
from tests.jobs import job
from tests.launching import Finished
from tests.static.networks import static_mode

WORKER = Path(__file__).with_name("replicas_worker.py")


def test_each_replica_goes_on_with_its_own_statistics(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    launch(WORKER, 2, args=[str(tmp_path)])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
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
        state = {name: array.tobytes().hex() for name, array in state_dict().items()}
    assert state == {**first["stages"], **second["stages"]}
