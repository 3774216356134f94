"""Every schedule on real ranks, beside the single model, in one job for each number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpipe.schedules import names
from tests.launching import ROOT, Finished

TRAIN = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from fleetpipe import fleet, parity
from fleetpipe.schedules import names
from tests.dygraph import sliced
from tests.dygraph.models import MODELS
from tests.pipelines import job, pipeline

ranks, models = int(sys.argv[2]), sys.argv[3].split(",")
found = {{}}
for schedule in names():
    for model in models:
        case = sliced.MODEL if schedule == "Seq1F1B" else MODELS[model]
        with job(ranks, 5, schedule):
            pipe = pipeline(case.layers(), loss_fn=case.loss)
            optimizer = fleet.distributed_optimizer(
                paddle.optimizer.Momentum(0.05, parameters=pipe.parameters())
            )
            session = parity.begin(pipe, optimizer)
            for step in range(2):
                session.step(case.batch(5, step))
            predicted = pipe.schedule.simulate().peak_activations
            held = {{r: peak for r, peak in pipe.peak_held.items() if peak != predicted[r]}}
            found[f"{{schedule}} {{model}}"] = [session.report.verdict(), held]
rank = os.environ["PADDLE_TRAINER_ID"]
with open(os.path.join(sys.argv[1], f"rank{{rank}}.json"), "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize(
    ("ranks", "models"), [(2, ["gpt", "convolutions"]), (4, ["gpt"])], ids=["two", "four"]
)
def test_every_schedule_is_bit_exact_on_real_ranks(
    launch: Callable[..., Finished], tmp_path: Path, ranks: int, models: list[str]
) -> None:
    launch(TRAIN, ranks, args=[str(tmp_path), str(ranks), ",".join(models)], timeout=280)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(found) == {f"{name} {model}" for name in names() for model in models}
        for case, (verdict, held) in found.items():
            assert verdict.endswith("bit-exact (losses, gradients and parameters)"), case
            assert held == {}, case
