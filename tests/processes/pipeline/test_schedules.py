"""Every schedule on real ranks, beside the single model, in one job for each number of ranks."""

from __future__ import annotations

import pytest

from fleetpipe import parity
from fleetpipe.schedules import names
from tests.dygraph import sliced
from tests.dygraph.models import MODELS
from tests.fixtures import Call
from tests.pipelines import model_in_job, momentum


def compared(ranks: int, model: str) -> dict[str, tuple[str, dict[int, int]]]:
    """The verdict of each schedule, and the ranks whose peak is not the planned one."""
    found = {}
    for schedule in names():
        case = sliced.MODEL if schedule == "Seq1F1B" else MODELS[model]
        with model_in_job(ranks, 5, schedule, layers=case.layers(), loss_fn=case.loss) as pipe:
            session = parity.begin(pipe, momentum(pipe))
            for step in range(2):
                session.step(case.batch(5, step))
            predicted = pipe.schedule.simulate().peak_activations
            held = {r: peak for r, peak in pipe.peak_held.items() if peak != predicted[r]}
            found[schedule] = session.report.verdict(), held
    return found


@pytest.mark.parametrize(("ranks", "model"), [(2, "convolutions"), (4, "gpt")])
def test_every_schedule_is_bit_exact_on_real_ranks(on_ranks: Call, ranks: int, model: str) -> None:
    for found in on_ranks(compared, ranks, ranks, model, timeout=280):
        assert set(found) == {*names()}
        for schedule, (verdict, held) in found.items():
            assert verdict.endswith("bit-exact (losses, gradients and parameters)"), schedule
            assert held == {}, schedule
