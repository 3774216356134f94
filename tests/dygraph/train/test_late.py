"""What streams of a GPU would show, on a CPU: all bits, over the late and poisoned transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

import fleetpipe
from fleetpipe.transport.wire.bridge import _import_shares
from tests.capture.models import trained
from tests.capture.test_models import MODELS as CAPTURED
from tests.dygraph import models
from tests.dygraph.models import MODELS, Model
from tests.dygraph.train.test_training import MICRO_BATCHES, SCHEDULES, check
from tests.pipelines import batch, bits, job, pipeline, sgd
from tests.transport.test_late import LateHub, stand_in


@pytest.fixture(autouse=True)
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateHub]]:
    made = stand_in(monkeypatch)
    yield made
    assert made
    assert not _import_shares() or sum(hub.memory.reused for hub in made)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    check(MODELS["gpt"], 4, schedule)


SPLIT_AND_NOT = ["1F1B", "Interleaved1F1B", "ZBH1", "ZBV"]


@pytest.mark.parametrize("schedule", SPLIT_AND_NOT)
def test_recompute_and_convolutions(schedule: str) -> None:
    check(MODELS["convolutions"], 2, schedule, recompute_interval=1, recompute_ctx={})


@pytest.mark.parametrize("schedule", SPLIT_AND_NOT)
def test_tied_weights(schedule: str) -> None:
    model = Model(models.layers, MODELS["gpt"].batch, models.loss)
    check(model, 3 if schedule == "1F1B" else 2, schedule)


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
def test_skip_connections(schedule: str) -> None:
    build, data, loss, cut, _ = CAPTURED["U-Net"]
    with job(3, MICRO_BATCHES, schedule):
        done = trained(build, data, loss_fn=loss, split_spec=cut, verify=False)
    assert done.differing == []


def test_steps_that_are_saved_while_training_goes_on(tmp_path: Path) -> None:
    def run(folder: Path) -> dict[int, dict[str, bytes]]:
        with job(3):
            paddle.seed(0)
            model = pipeline()
            optimizer = sgd(model)
            with fleetpipe.CheckpointManager(folder) as manager:
                states = {}
                for step in range(4):
                    model.train_batch(batch(seed=step), optimizer)
                    manager.save(step, model=model, optimizer=optimizer)
                    states[step] = bits(model.layers.full_state_dict())
                    # From here on the next step changes what is being written.
                return states

    def read(folder: Path, step: int) -> dict[str, bytes]:
        with job(1):
            model = pipeline()
            fleetpipe.CheckpointManager(folder).restore(step, model=model)
            return bits(model.layers.full_state_dict())

    states = run(tmp_path)
    assert {step: read(tmp_path, step) for step in states} == states
