"""What a step costs under a layout, the fastest of all layouts, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.clusters import Cluster, JobLayout, TrainingJob, Transformer
from fleetpipe.contrib.clusters.cutting import stages_of
from fleetpipe.contrib.clusters.layout_search import CHOICES, layouts, search
from fleetpipe.contrib.clusters.pipeline_time import pipeline_time, small
from fleetpipe.contrib.clusters.sensitivity import limits
from fleetpipe.profiling import PipelinePlan
from fleetpipe.profiling.memory import peak_bytes
from fleetpipe.schedules import Costs, build, register
from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.simulation.timeline import simulate
from tests.contrib.clusters.test_cluster import CLUSTER, MODEL, written
from tests.fixtures import Capture


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    """A small transformer on four hosts."""
    cluster = Cluster.read(written(tmp_path, CLUSTER))
    return TrainingJob(Transformer(**{**MODEL, "layers": 30}), cluster, 64)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBH1", 1), ("ZBH2", 1), ("ZBV", 2), ("VHalf", 2)],
)
def test_a_long_batch_takes_what_its_simulation_takes(
    job: TrainingJob, name: str, chunks: int
) -> None:
    ranks, micro_batches = 15 if chunks == 1 else 8, 500
    stages = job.stages(JobLayout(pipeline=ranks, chunks=chunks, data=1, schedule=name))
    assert stages is not None
    seconds, busy = pipeline_time(name, ranks, chunks, micro_batches, stages, 1e-5)
    schedule = build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    costs = Costs(
        tuple(stage.forward for stage in stages),
        tuple(stage.input_grad for stage in stages),
        tuple(stage.weight_grad for stage in stages),
        tuple(stage.backward for stage in stages),
        1e-5,
    )
    exact = simulate(schedule, costs)
    assert seconds == pytest.approx(exact.makespan, rel=2e-3)
    assert busy == pytest.approx(exact.busy, rel=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16, 30, 31, 32])
def test_a_cut_is_as_even_as_can_be(job: TrainingJob, stages: int) -> None:
    layers = job.model.costs(JobLayout(), job.cluster)
    made = stages_of(layers, stages)
    assert made is not None
    assert sum(stage.seconds for stage in made) == pytest.approx(
        sum(layer.forward + layer.whole for layer in layers)
    )
    block = layers[1].seconds
    most = max(layers[0].seconds, layers[-1].seconds, (32 // stages + 1) * block)
    assert max(stage.seconds for stage in made) <= most + block
    assert stages_of(layers, 33) is None


@pytest.mark.parametrize(("name", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_memory_is_that_of_plans(job: TrainingJob, name: str, chunks: int) -> None:
    layout = JobLayout(pipeline=4, chunks=chunks, data=8, schedule=name)
    memory, stages = job.memory(layout), job.stages(layout)
    assert memory is not None
    assert stages is not None
    schedule = build(name, ranks=4, micro_batches=8, chunks=chunks)
    exact = peak_bytes(schedule, stages, job.optimizer_copies)
    for rank, size in zip(memory, exact):
        assert rank.total == pytest.approx(size, rel=0.05)
    sharded = job.memory(layout._replace(data=1, sharding=8))
    assert sharded is not None
    assert sharded[0].optimizer == pytest.approx(memory[0].optimizer / 8)
    third = job.memory(layout._replace(data=1, sharding=8, sharding_stage=3))
    assert third is not None
    assert third[0].parameters == pytest.approx(memory[0].parameters / 8)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("name", ["FThenB", "1F1B", "ZBH1"])
def test_a_registered_schedule_has_the_memory_of_what_it_does(job: TrainingJob, name: str) -> None:
    register(f"My{name}", FAMILIES[name].rows)
    layout = JobLayout(pipeline=4, tensor=4, data=2, schedule=name)
    memory = job.memory(layout)
    assert memory is not None
    assert job.memory(layout._replace(schedule=f"My{name}")) == memory
    assert job.least(layout._replace(schedule=f"My{name}")) == job.least(layout)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_show_whether_a_schedule_splits_the_backward(name: str) -> None:
    chunks = FAMILIES[name].chunks
    whole = build(name, ranks=4, micro_batches=8, chunks=chunks)
    assert small(name, chunks).splits_backward == whole.splits_backward
    assert whole.splits_backward == (name[0] in "ZVD")


def test_a_step_is_its_parts(job: TrainingJob) -> None:
    one = job.estimate(JobLayout(pipeline=2, tensor=2, data=8, micro_batch=2))
    assert one is not None
    assert one.micro_batches == 4
    assert one.seconds == pytest.approx(one.computing + one.bubble + one.exchange + one.update)
    flops = 3 * 64 * job.model.forward_flops()
    assert one.utilisation == pytest.approx(flops / one.seconds / 32 / 3e14)
    hidden = replace(job, cluster=replace(job.cluster, overlapped_gradients=1.0))
    faster = hidden.estimate(one.layout)
    assert faster is not None
    assert faster.exchange == 0
    assert faster.seconds == pytest.approx(one.seconds - one.exchange)
    gathered = job.estimate(JobLayout(data=1, sharding=32, sharding_stage=3))
    whole = job.estimate(JobLayout(data=1, sharding=32))
    assert gathered is not None
    assert whole is not None
    assert gathered.computing > whole.computing
    assert job.estimate(JobLayout(pipeline=2, data=16, micro_batch=3)) is None
    assert job.estimate(JobLayout(pipeline=32, chunks=2, schedule="ZBV")) is None


def test_the_search_finds_the_fastest_that_fits(job: TrainingJob) -> None:
    small = replace(job, cluster=replace(job.cluster, memory=6e9))
    only = {**CHOICES, "tp": (1, 2), "micro-batch": (1, 2), "schedule": ("1F1B", "ZBV", "VHalf")}
    every = list(layouts(small, only))
    assert len(set(every)) == len(every) > 50
    assert all(layout.ranks == 32 for layout in every)
    made = [one for one in map(small.estimate, every) if one is not None]
    fitting = [one for one in made if one.peak <= 6e9]
    assert 0 < len(fitting) < len(made)
    outcome = search(small, only, 3)
    best = sorted(one.seconds for one in fitting)[:3]
    assert [one.seconds for one in outcome.best] == pytest.approx(best)
    assert outcome.played < len(made)
    faster = [one for one in made if one.peak > 6e9 and one.seconds < best[0]]
    assert (outcome.lacking is None) == (not faster)


def test_what_limits_is_what_would_help(job: TrainingJob) -> None:
    best = search(job, {"pp": (2,), "tp": (8,), "schedule": ("1F1B",)}, 1).best[0]
    rows = {row.resource: row for row in limits(job, best)}
    products = rows["FLOP/s of products"]
    assert 0 < products.seconds < best.seconds
    assert 0 < products.gain < 0.1
    # Tensor ranks share a host; nothing but gradients and the border of stages leaves one.
    assert rows["bandwidth inside a host"].seconds > 0
    assert rows["waiting (bubble)"].seconds == best.bubble
    assert rows["hosts"].gain > 0


def test_the_command_prints_tables_json_and_a_picture(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    model = str(written(tmp_path, {"transformer": MODEL}, "model.json"))
    cluster = str(written(tmp_path, CLUSTER, "cluster.json"))
    words = [model, "--cluster", cluster, "--batch", "64"]
    picture = tmp_path / "layouts.svg"
    only = ["--ranks", "2,4", "--only", "schedule=1f1b,ZBV"]
    assert main(["estimate", *words, *only, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for word in ("MFU", "optimizer", "what limits it", "FLOP/s of products", "32 devices"):
        assert word in printed
    assert "seconds of a step" in picture.read_text(encoding="utf-8")
    assert main(["estimate", *words, *only, "--top", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [one["layout"]["pipeline"] in (2, 4) for one in content["best"]] == [True, True]
    assert content["best"][0]["seconds"] <= content["best"][1]["seconds"]
    file = tmp_path / "plan.json"
    assert main(["plan", *words, "--only", "pp=2", "-o", str(file)]) == 0
    assert PipelinePlan.read(file).ranks == 2


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path, capsys: Capture) -> None:
    model = str(written(tmp_path, {"transformer": MODEL}, "model.json"))
    cluster = str(written(tmp_path, CLUSTER, "cluster.json"))
    tiny = str(written(tmp_path, {**CLUSTER, "memory": "20MB"}, "tiny.json"))
    for words, message in (
        (["--cluster", cluster], "give --batch"),
        (["--cluster", tiny, "--batch", "64"], "no layout fits"),
        (["--cluster", cluster, "--batch", "63", "--only", "pp=1"], "there is no layout"),
        (["--cluster", cluster, "--batch", "64", "--only", "pp=3,5"], "pp that divides 32"),
        (["--cluster", "nowhere.json", "--batch", "64"], "nowhere.json"),
    ):
        assert main(["estimate", model, *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["estimate", model, "--batch", "8"]) == 2
    assert "--batch is for layouts of a cluster" in capsys.readouterr().err
    assert main(["plan", model]) == 2
    assert "--cluster FILE" in capsys.readouterr().err
    for only in ("pp", "rows=2", "recompute=some", "schedule=2F2B", "tp=0"):
        words = ["estimate", model, "--cluster", cluster, "--batch", "64", "--only", only]
        assert main(words) == 2
