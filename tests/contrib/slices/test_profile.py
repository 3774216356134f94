"""The costs of a model that is measured in slices, and a plan made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetpipe import parity
from fleetpipe.errors import ConfigError
from fleetpipe.profiling import Link, PipelinePlan, Profile, Transfer, plan
from tests.contrib.slices import sliced
from tests.dygraph.observe.test_profile import require_nothing_stays
from tests.pipelines import ROWS, bits, job, model_in_job, pipeline, sgd


@pytest.mark.parametrize("slices", [3, (4, 2, 1)])
def test_slices_are_measured_one_by_one(slices: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    data = sliced.batch(2 * ROWS, 210)
    lengths = (70, 70, 70) if slices == 3 else (120, 60, 30)
    with job(2, 2, "Seq1F1B", slices=slices):
        model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
        before = bits(model.layers.state_dict())
        measured = model.profile(data, path)
        assert bits(model.layers.state_dict()) == before
    assert Profile.read(path) == measured
    assert measured.slice_lengths == lengths
    assert [len(part) for part in measured.slices] == [7, 7, 7]
    attention = [part[1] for part in measured.slices]
    width = 4 * sliced.WIDTH * ROWS
    for index, (one, length) in enumerate(zip(attention, lengths)):
        assert one.forward > 0
        assert one.backward is not None
        assert one.backward > 0
        assert one.output == width * length
        # The weights of all places seen, in the middle of what is held.
        seen = sum(lengths[: index + 1])
        scores = 4 * ROWS * length * seen
        assert scores < one.held < scores + 20 * width * seen
    with job(2, 2, "auto", costs=path):
        model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
        assert model.schedule.slices in (1, 3)


def test_a_plan_of_slices_trains_as_the_single_model_does() -> None:
    data = sliced.batch(2 * ROWS, 24)
    with job(2, 2, "Seq1F1B", slices=2):
        model = pipeline(sliced.layers(), loss_fn=sliced.loss)
        measured = model.profile(data)
    # As if slices took no longer in all than whole sequences do: they are that short here. And as
    # if layers took equally long: where one takes far longer, other schedules fit the cap as well.
    times = {"forward": 1e-3, "backward": 2e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
    *layers, loss = (replace(layer, **times) for layer in (*measured.layers, measured.loss))
    half = [
        replace(layer, forward=5e-4, backward=1e-3, held=1, working=1) for layer in (*layers, loss)
    ]
    measured = replace(
        measured,
        layers=tuple(layers),
        loss=loss,
        links=(Link(0, 0),),
        transfer=Transfer(),
        slices=(tuple(half),) * 2,
    )
    cap = max(plan(measured, 2, 2, search=()).predicted.peak_bytes) - 1
    chosen = plan(measured, 2, 2, memory_cap=cap, search=("schedule",))
    assert (chosen.schedule.name, chosen.schedule.slices) == ("Seq1F1B", 2)
    assert PipelinePlan.loads(chosen.dumps()) == chosen
    assert chosen.schedule_for(5).slices == 2
    with model_in_job(2, 2, layers=sliced.layers(), loss_fn=sliced.loss, plan=chosen) as model:
        session = parity.begin(model, sgd(model))
        session.step(data)
        assert session.report.bit_exact, session.report.verdict()
    refused = pytest.raises(ConfigError, match="lengths of another number of slices")
    with job(2, 2, slices=(1, 2, 1)), refused:
        pipeline(sliced.layers(), loss_fn=sliced.loss, plan=chosen)


def test_nothing_stays_in_memory() -> None:
    with job(2, 2, "Seq1F1B", slices=3):
        model = pipeline(sliced.layers(), loss_fn=sliced.loss)
        require_nothing_stays(model, sliced.batch(2 * ROWS, 24))
