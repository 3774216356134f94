"""Two real ranks, in dynamic and in static graph.

As two replicas of a model with running statistics: what a resumed run has is compared with the
uninterrupted one on each rank, and the statistics of the moment of saving are noted. And as the two
stages of a program, each with a dropout.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fleetpipe
from fleetpipe.static import state_dict
from tests.checkpoint.test_static import AFTER, BEFORE, Dynamic, Static
from tests.jobs import job
from tests.static.networks import static_mode

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
#: What a program and a model are called by each other.
Arrays = dict[str, np.ndarray]


def part(feeds: Sequence[Any]) -> list[Any]:
    """This replica's part of the data."""
    return [{name: np.split(rows, 2)[RANK] for name, rows in feed.items()} for feed in feeds]


def of_model(run: Dynamic) -> Arrays:
    return {name: tensor.numpy() for name, tensor in run.model.layers.own_state().items()}


def statistics(state: Arrays) -> Any:
    """The running means and variances, which are no parameters."""
    return {
        name: array.tolist()
        for name, array in state.items()
        if name.rpartition(".")[2] in ("_mean", "_variance", "w_1", "w_2")
    }


def same(one: Arrays, other: Arrays) -> bool:
    return {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def dynamic(home: Path) -> tuple[Any, bool]:
    with job(1, 2, dp=2):
        run = Dynamic()
        run.train(part(BEFORE))
        fleetpipe.CheckpointManager(home).save(3, **run.objects)
        saved = statistics(of_model(run))
        losses, ended = run.train(part(AFTER)), of_model(run)
    with job(1, 2, dp=2):
        run = Dynamic(seed=9)
        fleetpipe.CheckpointManager(home).restore(**run.objects)
        return saved, run.train(part(AFTER)) == losses and same(of_model(run), ended)


def static(home: Path) -> tuple[Any, bool]:
    with static_mode():
        run = Static(1, micro_batches=2)
        run.train(part(BEFORE))
        fleetpipe.CheckpointManager(home).save(3, **run.objects)
        saved = statistics(state_dict())
        losses, ended = run.train(part(AFTER)), state_dict()
    with static_mode():
        run = Static(1, seed=9, micro_batches=2)
        fleetpipe.CheckpointManager(home).restore(**run.objects)
        return saved, run.train(part(AFTER)) == losses and same(state_dict(), ended)


def stages(home: Path) -> Any:
    with static_mode():
        run = Static(dropout=[0, 1])
        run.train(BEFORE)
        fleetpipe.CheckpointManager(home, async_save=True).save(3, **run.objects)
        run.train(AFTER)
        return {name: array.tobytes() for name, array in state_dict().items()}


def everything(folder: Path) -> dict[str, Any]:
    """How replicas went on in both graphs, and the state of the stages, saved in FOLDER/stages."""
    replicas = {"dynamic": dynamic(folder / "dynamic"), "static": static(folder / "static")}
    return {"replicas": replicas, "stages": stages(folder / "stages")}
