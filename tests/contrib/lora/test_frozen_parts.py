"""Runs of which parts are frozen have the bits of plain Paddle, whatever stages train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from tests.contrib.lora.test_lora import MICRO_BATCHES, Net, adamw, described, train_plainly
from tests.pipelines import batch, bits, job, pipeline

STEPS = 4
#: What is trained at first, and from the third step on: the beginnings of names.
PARTS = {
    "the head": (("3.",), ("3.",)),
    "the first layer": (("0.",), ("0.",)),
    "a layer between": (("1.up",), ("1.up",)),
    "biases of both ends": (("0.bias", "3.bias"), ("0.bias", "3.bias")),
    "the head, then more": (("3.",), ("1.", "3.")),
    "the first layer, then the head": (("0.",), ("3.",)),
}
#: Schedules with ranks, and options of the layers and of the job.
RUNS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (4, "1F1B", {}, {}),
    (4, "ZBH1", {"recompute_interval": 1, "recompute_ctx": {}}, {}),
    (2, "ZBV", {}, {"order": "ready"}),
]


def train_alone(named: Any, beginnings: tuple[str, ...]) -> None:
    for name, parameter in named:
        parameter.stop_gradient = not name.startswith(beginnings)


def plainly(begin: dict[str, Any], parts: tuple[tuple[str, ...], ...]) -> dict[str, bytes]:
    model = Net()
    model.set_state_dict(begin)
    train_plainly(
        model, STEPS, lambda step: train_alone(model.named_parameters(), parts[step // 2])
    )
    return bits(model.state_dict())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[1])
@pytest.mark.parametrize("parts", PARTS)
def test_a_run_goes_on_in_another_layout(parts: str, run: Any, tmp_path: Path) -> None:
    """Two steps, then two more of a restored run, with another optimizer list."""
    (ranks, schedule, options, own), trained = run, PARTS[parts]
    manager = fleetpipe.CheckpointManager(tmp_path)
    begin: dict[str, Any] = {}
    for half, pp in enumerate((2, ranks)):
        with job(pp, MICRO_BATCHES, schedule if half else "1F1B", **own):
            paddle.seed(0)
            model = pipeline(described(), **options)
            begin = begin or model.layers.full_state_dict()
            train_alone(model.layers.named_parameters(), trained[half])
            parameters = model.parameters()
            if trained[0] == trained[1] and half:
                parameters = [p for p in parameters if not p.stop_gradient]
            optimizer = fleet.distributed_optimizer(adamw(parameters))
            if half:
                manager.restore(model=model, optimizer=optimizer)
            for step in (2 * half, 2 * half + 1):
                model.train_batch(batch(MICRO_BATCHES, step), optimizer)
            manager.save(step, model=model, optimizer=optimizer)
            state = bits(model.layers.full_state_dict())
    assert state == plainly(begin, trained)
