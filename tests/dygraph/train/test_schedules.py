"""Every schedule against the single model: all bits, and the activations that ranks hold."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe import parity
from fleetpipe.schedules import names
from tests.dygraph.models import MODELS, Model
from tests.pipelines import adam, job, pipeline, train

MICRO_BATCHES = 4

#: Seq1F1B needs layers that take slices: tests/contrib/slices.
SCHEDULES = [name for name in names() if name != "Seq1F1B"]


def check(
    model: Model, ranks: int, schedule: str, micro_batches: int = MICRO_BATCHES, **options: Any
) -> Any:
    """Trains two steps beside the single model, the second with parameters that have moved.

    Returns the schedule.
    """
    with job(ranks, micro_batches, schedule):
        pipe = pipeline(model.layers(), loss_fn=model.loss, **options)
        session = parity.begin(pipe, adam(pipe))
        for step in range(2):
            session.step(model.batch(micro_batches, step))
        assert session.report.passed, session.report.verdict()
        assert tuple(pipe.peak_held.values()) == pipe.schedule.simulate().peak_activations
        assert pipe._runtime.stage._kept == {}
        assert pipe._runtime.stage.split._tapes == {}
        return pipe.schedule


# Each schedule with each model, of two ranks, is compared below; of four ranks in test_late.py.
@pytest.mark.once
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 1), ("gpt", 2), ("convolutions", 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_pipeline_has_the_bits_of_the_single_model(
    model: str, schedule: str, ranks: int
) -> None:
    check(MODELS[model], ranks, schedule)


@pytest.mark.once
@pytest.mark.parametrize("micro_batches", [1, 3, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_will_do(schedule: str, micro_batches: int) -> None:
    check(MODELS["mlp"], 2, schedule, micro_batches)


@pytest.mark.once
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B", "Interleaved1F1B", "ZBH1", "auto"])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 3), (2, 2), (2, 4), (3, 3)])
def test_loops_take_any_number_of_chunks(schedule: str, ranks: int, chunks: int) -> None:
    made = check(MODELS["gpt"], ranks, schedule, num_virtual_pipeline_stages=chunks)
    assert made.placement.stages == ranks * chunks


@pytest.mark.parametrize("model", MODELS)
def test_all_schedules_end_with_the_same_parameters(model: str) -> None:
    kind = MODELS[model]
    first, *others = (
        train(kind.layers(), 2, name, data=kind.batch, optimizer=adam, loss_fn=kind.loss)
        for name in SCHEDULES
    )
    assert others == [first] * len(others)
