"""``fleetpipe parity SCRIPT``: an unedited script, shadowed, or by ``--whole`` beside itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleetpipe.cli import main
from fleetpipe.compare import trail, whole_runs
from fleetpipe.compare.trail import BEGIN, CallRecord, Changes, Summary, compare
from fleetpipe.compare.whole_runs import Judge, Variant
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.dygraph.train import pipeline_parallel
from fleetpipe.errors import ConfigError, UsageError
from tests.fixtures import Capture, Patch
from tests.launching import ROOT
from tests.parity.whole_examples import of_example, verdicts

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


def test_a_right_script_passes_also_where_it_steps_by_itself(script: Path, capsys: Capture) -> None:
    report = script.with_suffix(".json")
    originals = PipelineParallel.train_batch, PipelineOptimizer.step
    assert main(["parity", "--report", str(report), str(script), "--again"]) == 0
    assert (PipelineParallel.train_batch, PipelineOptimizer.step) == originals
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
from tests.pipelines import job

with job(pp=2, micro_batches=4, rows=2):
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


WHOLE_SCRIPT = """
import os, sys
import numpy as np, paddle
from paddle import nn
import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"pp_degree": 2}
strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(3)
layers = [LayerDesc(nn.Linear, 4, 4), LayerDesc(nn.Dropout, 0.5), LayerDesc(nn.Linear, 4, 4)]
topology = fleet.get_hybrid_communicate_group().topology()
pipe = PipelineLayer(layers, topology=topology, loss_fn=nn.MSELoss())
model = fleet.distributed_model(pipe)
optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, parameters=pipe.parameters()))
drawn = np.random.default_rng(0).normal(size=(5, 2, 4, 4)).astype("float32")
average = {"loss": 0.0}
state = {"state": average} if "kept" in sys.argv else {}
manager = fleetpipe.CheckpointManager("saved", max_to_keep=1)
run = fleetpipe.resume(model, optimizer, manager=manager, **state)
for step in run.steps(4):
    loss = model.train_batch([paddle.to_tensor(part) for part in drawn[step]], optimizer)
    if "clamps" in sys.argv:
        norm = sum(float(p.norm()) for p in model.parameters())
        for parameter in model.parameters():
            parameter.set_value(parameter / norm)
    average["loss"] += float(loss) if "average" in sys.argv else 0.0
    if average["loss"]:
        optimizer.set_lr(0.01 / average["loss"])
print(f"loss {float(loss):.6f}")
"""


def compared(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the verdict of each way."""
    (folder / "train.py").write_text(WHOLE_SCRIPT)
    return verdicts(Path("train.py"), " ".join(arguments), folder, *options)


@pytest.mark.once
@pytest.mark.processes
def test_an_example_is_equal_in_every_way(tmp_path: Path) -> None:
    found = of_example("static_mlp", tmp_path)
    assert len(found) == 5
    assert not [verdict for verdict in found.values() if verdict.startswith("NOT ")], found


@pytest.mark.once
@pytest.mark.processes
def test_a_right_script_is_equal_in_every_way(tmp_path: Path) -> None:
    options = "--nproc", "2", "--also", "schedule=ZBH1"
    verdicts = compared(tmp_path, "average", "kept", options=options)
    equal = "4 steps, 5 calls: equal in every bit"
    assert verdicts == {
        "one process": "4 steps, 5 calls",
        "one process, again": equal,
        "2 ranks": equal,
        "one device": "equal in every bit",
        "stopped and resumed": "2 steps, 3 calls: equal in every bit",
        "schedule=ZBH1": equal,
    }
    assert not (tmp_path / "saved").exists()


@pytest.mark.once
@pytest.mark.processes
def test_what_ranks_and_a_second_start_do_otherwise_is_named_with_its_line(tmp_path: Path) -> None:
    verdicts = compared(tmp_path, "clamps", "average", options=("--nproc", "2", "--steps", "3"))
    again, ranks, stopped = (
        verdicts[way] for way in ("one process, again", "2 ranks", "stopped and resumed")
    )
    assert again == "3 steps, 4 calls: equal in every bit"
    assert ranks.startswith("NOT DIFFERS: result of train_batch after 2 steps differs by ")
    assert "train.py, line 2" in ranks
    # The division of weights behind the step that was saved last.
    assert stopped.startswith("NOT DIFFERS: state '0.weight' of the model of begin differs")


def summary(*numbers: float) -> Summary:
    return Summary.of_array("float32", np.array(numbers, "float32"))


def labels(*numbers: int) -> Summary:
    return Summary.of_array("int64", np.array(numbers))


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (summary(1, 2), summary(1, 2), 0.0),
        (summary(1, 2), summary(1, 3), 1 / 3),
        (summary(1, math.nan), summary(1, 2), math.inf),
        (Summary.of_plain("a"), Summary.of_plain("b"), math.inf),
        (Summary.of_plain(2), Summary.of_plain(2.0), math.inf),
        (Summary.of_plain(2), Summary.of_plain(3), math.inf),
        (labels(1, 2), labels(2, 1), math.inf),
        (summary(1, 2, 3), summary(3, 2, 1), 0.8),
        (summary(1, 2)._replace(digest="other"), summary(1, 2), 1e-16),
    ],
)
def test_how_far_two_values_are_apart(one: Summary, other: Summary, apart: float) -> None:
    assert one.distance(other) == pytest.approx(apart, rel=0.3)


def event(loss: float, call: str = "train_batch", **state: float) -> CallRecord:
    named = {name: Summary.of_plain(value) for name, value in state.items()}
    return CallRecord(call, "train.py, line 1", 1, {"": Summary.of_plain(loss)}, named)


def test_events_survive_their_file(tmp_path: Path) -> None:
    written_event = event(0.1, weight=1.0)
    trail.file_of(tmp_path, 3).write_text(written_event.to_json() + "\n")
    assert trail.read(tmp_path) == [[written_event]]


@pytest.mark.parametrize(
    ("got", "first"),
    [
        ([[event(0.5, a=1.0), event(0.4, b=2.0)]], ""),
        ([[event(0.5, a=1.0), event(0.4)], [event(0.5), event(0.4, b=2.0)]], ""),
        ([[event(0.5, a=1.0), event(0.3, b=2.0)]], "result of train_batch"),
        ([[event(0.5, a=1.0), event(0.4, b=3.0)]], "state b of train_batch"),
        ([[event(0.5, a=1.0), event(0.4)]], "state b of train_batch"),
        (
            [[event(0.5, a=1.0), event(0.4, "eval_batch", b=2.0)]],
            "train_batch after 1 steps: the",
        ),
        ([[event(0.5, a=1.0)]], "train_batch after 1 steps: the"),
    ],
)
def test_the_first_difference_is_named(got: list[list[CallRecord]], first: str) -> None:
    found = compare([[event(0.5, a=1.0), event(0.4, b=2.0)]], got)
    assert (str(found.first) if found.first else "").startswith(first)
    assert bool(found.first) == bool(first)
    assert not found.rounding


def test_rounding_is_told_from_another_number() -> None:
    assert compare([[event(0.5)]], [[event(0.5 + 1e-8)]]).rounding
    assert not compare([[event(0.5)]], [[event(0.5 + 1e-4)]]).rounding


def ran(*starts: list[CallRecord]) -> Any:
    """A variant whose starts have left these trails on one rank."""
    return SimpleNamespace(
        variant=Variant("stopped"),
        code=0,
        printed={},
        files={},
        trail=lambda start=0: [starts[start]],
    )


@pytest.mark.parametrize(
    ("weight", "verdict"), [(1.0, "1 steps, 2 calls: equal in every bit"), (7.0, "DIFFERS: state ")]
)
def test_a_second_start_may_evaluate_before_it_trains(weight: float, verdict: str) -> None:
    evaluated, *trained = event(0.9, "eval_batch"), event(0.5, a=1.0), event(0.4, a=2.0)
    whole = ran([event(0.0, BEGIN, a=0.0), trained[0], evaluated, trained[1], evaluated])
    stopped = ran(whole.trail()[0][:2], [evaluated, event(0.0, BEGIN, a=weight), trained[1]])
    assert Judge(whole, whole).verdict_of_restart(stopped).verdict.startswith(verdict)


def test_files_and_lines_are_compared_by_their_numbers(tmp_path: Path) -> None:
    before = whole_runs.stamps(tmp_path)
    (tmp_path / "log.csv").write_text("rank 1, loss 0.25\n")
    np.save(tmp_path / "loss.npy", np.array([0.5]))
    found = whole_runs.files_in(tmp_path, before)
    assert found["log.csv"]["rank #, loss #.# (1)"].numbers == (0.25,)
    assert found["loss.npy"][""].numbers == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "ranks"), [("pp=4", 1), ("pp=2,dp=2", 4), ("schedule=ZBH1", 1), ("dp=3", 3)]
)
def test_the_processes_of_a_changed_layout(text: str, ranks: int) -> None:
    assert Changes.of(text).ranks == ranks


@pytest.mark.parametrize("text", ["pp=0", "rows=2", "pp", "schedule=1F1C", ""])
def test_a_change_that_is_none_is_refused_before_the_script_runs(text: str) -> None:
    with pytest.raises((ConfigError, UsageError), match="schedule"):
        Changes.of(text)


def test_generators_that_are_not_seeded_are_left_out_and_named() -> None:
    def drawn(loss: float, state: str) -> CallRecord:
        around = {"random numbers of NumPy": Summary.of_bytes("state", state.encode())}
        return replace(event(loss), around=around)

    whole, again = ran([drawn(0.5, "a")]), ran([drawn(0.5, "b")])
    assert Judge(whole, again).verdict_of(again).passed
    verdict = Judge(whole, again).verdict_of(ran([drawn(0.7, "b")])).verdict
    assert verdict.startswith("DIFFERS: result of train_batch after 1 steps differs by 2.9e-01")
    assert verdict.endswith("; not seeded: random numbers of NumPy")


@pytest.mark.parametrize(("loss", "passed"), [(0.5, False), (0.5 + 1e-8, True)])
def test_digests_of_files_count_where_the_calls_have_the_same_bits(
    loss: float, passed: bool
) -> None:
    whole, other = ran([event(0.5)]), ran([event(loss)])
    for run, content in ((whole, b"a"), (other, b"b")):
        run.files["saved"] = {"weight": Summary.of_bytes("tensor", content)}
    assert Judge(whole, whole).verdict_of(other).passed == passed
