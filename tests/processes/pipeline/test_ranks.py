"""What only real ranks show: who gets the loss, who needs data, state across ranks, evaluation."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paddle import nn

from fleetpipe.contrib.view import read_trace, steps_of
from fleetpipe.fleet import lifecycle
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.schedules import build
from tests.engine.test_trace import actions
from tests.launching import ROOT, Finished, JobFailed
from tests.pipelines import batch, job, pipeline, sgd

PARITY = """
import sys
from tests.pipelines import adam, batch, job, pipeline

with job(2):
    model = pipeline()
    if "--wrong" in sys.argv and model.is_pipeline_last_stage():
        model.layers.state_dict()["4.weight"].register_hook(lambda grad: grad * 2)
    optimizer = adam(model)
    for seed in range(3):
        model.train_batch(batch(seed=seed), optimizer)
    model.eval_batch([part[:7] for part in batch()], compute_loss=True)
    model.predict_batch(batch()[0])
"""


def test_the_parity_command_on_two_ranks(launch: Callable[..., Finished], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PARITY)
    launched = ROOT / "fleetpipe" / "launch" / "rank_main.py"
    right = launch(launched, 2, args=["parity", str(script)])
    wrong = launch(launched, 2, args=["parity", str(script), "--wrong"], check=False)
    assert wrong.returncode == 1
    for good, bad in zip(right.logs, wrong.logs):
        assert "compared 3 steps and 2 evaluations" in good
        assert "parity: bit-exact (losses, gradients and parameters)" in good
        assert "first difference: step 0: gradient of 4.weight" in bad


def fail_on_the_last_stage() -> None:
    with job(2, timeout=100):
        model = pipeline([LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 9, 4)])
        model.train_batch(batch(), sgd(model))


def test_an_exception_on_one_rank_ends_the_other(on_ranks: Callable[..., Any]) -> None:
    with pytest.raises(JobFailed) as failed:
        on_ranks(fail_on_the_last_stage, 2, timeout=150)
    ended = failed.value.job
    assert isinstance(ended, Finished)
    assert ended.returncode != 0
    assert "layer 1 (Linear) cannot take what layer 0 returned" in ended.logs[1]
    assert "PeerFailed" in ended.logs[0]
    assert "rank 1" in ended.logs[0]
    assert ended.seconds < 90  # far below the limit of a wait


def begin_after_slow_groups() -> tuple[float | None, float]:
    """Begins a job in which rank 1 takes 3 s for its groups; when these were made, and it began."""
    moments = []
    make = lifecycle._make_groups

    def make_slowly(*arguments: Any) -> Any:
        made = make(*arguments)
        time.sleep(3)
        moments.append(time.time())
        return made

    if os.environ["PADDLE_TRAINER_ID"] == "1":
        lifecycle._make_groups = make_slowly
    with job(2):
        return (moments or [None])[0], time.time()


def test_nobody_leaves_the_start_while_others_make_groups(on_ranks: Callable[..., Any]) -> None:
    (_, began), (made, _) = on_ranks(begin_after_slow_groups, 2)
    assert began >= made


TRACED = """
    import sys
    from tests.pipelines import batch, mlp_and_sgd

    with mlp_and_sgd(2, micro_batches=4, trace=sys.argv[1]) as (model, optimizer):
        for step in range(3):
            model.train_batch(batch(seed=step), optimizer)
"""


def test_the_trace_of_two_ranks(launch: Callable[..., Finished], tmp_path: Path) -> None:
    done = launch(TRACED, 2, args=[str(tmp_path)])
    document = json.loads((tmp_path / "trace.json").read_text())
    rows = build("1F1B", ranks=2, micro_batches=4).actions
    assert actions(document, 2) == [[str(action) for action in row] * 3 for row in rows]
    told = r"bubble rate 0\.\d+ measured after the first step, 0\.\d+ predicted"
    assert re.search(told, done.logs[0])
    assert "bubble rate" not in done.logs[1]
    steps = steps_of(read_trace(tmp_path / "trace.json"), one_thread=True)
    assert [len(step.operations) for step in steps] == [2 * (8 + 8)] * 3
