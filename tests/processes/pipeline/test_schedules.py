"""Every schedule on real ranks, beside the single model, in one job for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleetpipe import parity
from fleetpipe.schedules import names
from tests.dygraph import sliced
from tests.dygraph.models import MODELS
from tests.pipelines import job, momentum, pipeline


def compared(ranks: int, models: list[str]) -> dict[str, tuple[str, dict[int, int]]]:
    """The verdict of each schedule and model, and the ranks whose peak is not the planned one."""
    found = {}
    for schedule in names():
        for model in models:
            case = sliced.MODEL if schedule == "Seq1F1B" else MODELS[model]
            with job(ranks, 5, schedule):
                pipe = pipeline(case.layers(), loss_fn=case.loss)
                session = parity.begin(pipe, momentum(pipe))
                for step in range(2):
                    session.step(case.batch(5, step))
                predicted = pipe.schedule.simulate().peak_activations
                held = {r: peak for r, peak in pipe.peak_held.items() if peak != predicted[r]}
                found[f"{schedule} {model}"] = session.report.verdict(), held
    return found


@pytest.mark.parametrize(
    ("ranks", "models"), [(2, ["gpt", "convolutions"]), (4, ["gpt"])], ids=["two", "four"]
)
def test_every_schedule_is_bit_exact_on_real_ranks(
    on_ranks: Callable[..., Any], ranks: int, models: list[str]
) -> None:
    for found in on_ranks(compared, ranks, ranks, models, timeout=280):
        assert set(found) == {f"{name} {model}" for name in names() for model in models}
        for case, (verdict, held) in found.items():
            assert verdict.endswith("bit-exact (losses, gradients and parameters)"), case
            assert held == {}, case
