"""``fleetpipe parity SCRIPT`` in one process: an unedited script, shadowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.train import pipeline_parallel
from tests.fixtures import Capture, Patch
from tests.launching import ROOT

SCRIPT = """
import sys
import paddle
from fleetpipe import fleet
from tests.pipelines import batch, job, momentum, pipeline, sgd

with job(2):
    model = pipeline()
    if "--wrong" in sys.argv:
        model.layers.state_dict()["4.weight"].register_hook(lambda grad: grad * 2)
    scheduler = paddle.optimizer.lr.StepDecay(0.1, 1)
    optimizer = (momentum if "--again" in sys.argv else sgd)(model, scheduler)
    for seed in range(3):
        print(float(model.train_batch(batch(seed=seed), optimizer, scheduler)))
        if "--again" in sys.argv:
            optimizer.step()
            optimizer.clear_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_step_that_the_script_takes_by_itself_is_taken_beside_it(
    script: Path, capsys: Capture
) -> None:
    step = PipelineOptimizer.step
    assert main(["parity", str(script), "--again"]) == 0
    assert PipelineOptimizer.step is step
    assert "parity: bit-exact" in capsys.readouterr().out


def test_a_right_script_passes(script: Path, capsys: Capture) -> None:
    report = script.with_suffix(".json")
    original = PipelineParallel.train_batch
    assert main(["parity", "--report", str(report), str(script)]) == 0
    assert PipelineParallel.train_batch is original
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "parity: bit-exact (losses, gradients and parameters)"
    (found,) = json.loads(report.read_text())
    assert found["pipeline_loss"] == [float(line) for line in lines[:3]]
    assert (found["passed"], found["steps"]) == (True, 3)


def test_fit_is_compared_with_short_batches_and_steps_of_several(
    script: Path, capsys: Capture
) -> None:
    script.write_text(
        """
import paddle, fleetpipe
from paddle import nn
from tests import jobs

with jobs.job(pp=2, micro_batches=4, rows=2):
    rows = paddle.io.TensorDataset([paddle.randn([21, 6]), paddle.randint(0, 3, [21, 1])])
    model = fleetpipe.Model([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)])
    adam = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    model.prepare(adam, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    for batches in (1, 2):
        model.fit(rows, rows, batch_size=8, verbose=0, accumulate_grad_batches=batches)
"""
    )
    report = script.with_suffix(".json")
    assert main(["parity", "--report", str(report), str(script)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("parity: bit-exact")
    (found,) = json.loads(report.read_text())
    assert (found["steps"], found["single_loss"]) == (5, found["pipeline_loss"])


def test_a_script_may_be_ended_earlier(script: Path, capsys: Capture) -> None:
    assert main(["parity", "--steps", "2", str(script)]) == 0
    assert "compared 2 steps" in capsys.readouterr().out
    assert main(["parity", "--also", "pp=1", str(script)]) == 2
    assert "what to do: fleetpipe parity --whole" in capsys.readouterr().err


def test_a_wrong_script_fails_and_names_the_layer(script: Path, capsys: Capture) -> None:
    assert main(["parity", str(script), "--wrong"]) == 1
    assert "first difference: step 0: gradient of 4.weight" in capsys.readouterr().out


def test_an_error_of_the_script_keeps_its_traceback(script: Path) -> None:
    script.write_text("open('none.txt')")
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        main(["parity", str(script)])


def test_evaluations_of_a_script_are_compared_where_it_calls_them(
    script: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    before = "model.predict_batch(batch()[0][:3])\n    for seed"
    lines = script.read_text().replace("for seed", before)
    script.write_text(lines + "    print(float(model.eval_batch(batch(), compute_loss=True)))\n")
    assert main(["parity", str(script)]) == 0
    assert "compared 3 steps and 2 evaluations under" in capsys.readouterr().out
    monkeypatch.setattr(pipeline_parallel, "join_outputs", lambda outputs: outputs[0])
    assert main(["parity", str(script)]) == 1
    assert "first difference: step 0: output of predict_batch" in capsys.readouterr().out


@pytest.mark.parametrize(("theirs", "code"), [(0, 0), (1, 1), (2, 2), (-9, 1)])
def test_the_code_of_launched_ranks_is_passed_on(
    theirs: int, code: int, script: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("fleetpipe.launch.script.launch", lambda options, *words: theirs)
    assert main(["parity", "--nproc", "2", str(script)]) == code


def test_what_cannot_be_compared_is_refused(script: Path, capsys: Capture) -> None:
    text = script.read_text()
    script.write_text(text.replace("scheduler)))", "scheduler, None, 1)))"))
    assert main(["parity", str(script)]) == 2
    assert "loss_fn_idx=1" in capsys.readouterr().err


def test_a_script_that_trains_nothing_or_is_not_there_is_no_success(
    tmp_path: Path, capsys: Capture, script: Path
) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert main(["parity", str(empty)]) == 2
    assert main(["parity", str(tmp_path / "missing.py")]) == 2
    told = capsys.readouterr().err
    assert "fleetpipe: NOTHING WAS COMPARED: the script never called train_batch" in told
    assert "forward_backward_pipeline\n  what to do: train by train_batch; or" in told
