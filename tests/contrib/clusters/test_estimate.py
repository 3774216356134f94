"""Estimates for clusters that are not there: products and exchanges, steps, layouts, commands.

A file says what a cluster and a model are. Errors beside published step times stay within what
docs/estimate.md says.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.validate import TABLES, predictions, rows, summary
from fleetpipe.cli import main
from fleetpipe.contrib.clusters import (
    Cluster,
    JobLayout,
    TrainingJob,
    Transformer,
    pipeline_time,
    schedule_on_two_ranks,
    stages_of,
)
from fleetpipe.contrib.clusters.layout_search import CHOICES, layouts, limits, search
from fleetpipe.contrib.clusters.workload import MeasuredModel, read_model
from fleetpipe.errors import ConfigError
from fleetpipe.profiling import Link, PipelinePlan
from fleetpipe.profiling.memory import peak_bytes
from fleetpipe.schedules import Costs, build, register
from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.simulation import simulate
from tests.fixtures import Capture
from tests.profiling.test_profile import even

CLUSTER: dict[str, Any] = {
    "hosts": 4,
    "devices": 8,
    "memory": "80GB",
    "memory_bandwidth": 1.5e12,
    "peak": 3e14,
    "flops": {"bfloat16": [[1000, 1e14], [4000, 2e14]], "float32": 1e13},
    "inside": {"latency": 1e-5, "bandwidth": 2e11},
    "between": {"latency": 2e-5, "bandwidth": 2e10},
}
MODEL: dict[str, Any] = {
    "layers": 4,
    "hidden": 1024,
    "heads": 16,
    "vocabulary": 32000,
    "sequence": 2048,
}


def written(tmp_path: Path, content: object, name: str = "file.json") -> Path:
    """A file with some JSON."""
    path = tmp_path / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def cluster_of(tmp_path: Path, **changes: object) -> Cluster:
    """The cluster, read from a file."""
    return Cluster.read(written(tmp_path, {**CLUSTER, **changes}))


def test_products_follow_the_curve(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    assert cluster.ranks == 32
    for edge, speed in ((500, 1e14), (1000, 1e14), (2000, 2**0.5 * 1e14), (9000, 2e14)):
        seconds = cluster.product("bfloat16", edge, edge, edge)
        assert seconds == pytest.approx(2 * edge**3 / speed)
    assert cluster.product("float32", 8000, 1000, 1000) == pytest.approx(1.6e10 / 1e13)
    with pytest.raises(ConfigError, match="float16"):
        cluster.product("float16", 1, 1, 1)


def test_exchanges_use_the_links_that_they_cross(tmp_path: Path) -> None:
    cluster, size = cluster_of(tmp_path), 8e9
    assert cluster.reduce(size, (1, 1)) == 0
    inside = 2 * (7 * 1e-5 + 7 / 8 * size / 2e11)
    assert cluster.reduce(size, (8, 1)) == pytest.approx(inside)
    # One member in each host, then eight that share its links.
    alone = 3 * 2e-5 + 3 / 4 * size / 2e10
    assert cluster.gather(size, (4, 8)) == pytest.approx(alone)
    shared = 31 * 2e-5 + 31 / 32 * size / 1.6e11
    assert cluster.gather(size, (32, 1)) == pytest.approx(shared)
    tree = cluster_of(tmp_path, all_reduce="tree")
    assert tree.gather(size, (8, 1)) == pytest.approx(3 * 1e-5 + 7 / 8 * size / 2e11)
    both = 2e-5 + 24 / 32 * size / 2e10 + 1e-5 + 7 / 32 * size / 2e11
    assert cluster.exchange(size, (32, 1)) == pytest.approx(both)
    assert (cluster.link(7), cluster.link(8)) == (cluster.inside, cluster.between)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, "hosts"),
        ({"peak": 1.5e14}, r"(?s)peak.*2e\+14 or more"),
        ({"memory": "lots"}, "80GB"),
        ({"flops": {}}, "at least one dtype"),
        ({"flops": {"float32": [[2, 1], [1, 1]]}}, "sizes rising"),
        ({"inside": {"latency": 0}}, "bandwidth"),
        ({"all_reduce": "star"}, "ring or tree"),
        ({"overlapped_gradients": 2}, "0 to 1"),
        ({"host": 1}, "hosts"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "1 or more"),
        ({"heads": 12}, "heads divides"),
        ({"kv_heads": 3}, "kv_heads divides"),
        ({"dtype": "int4"}, "bfloat16"),
        ({"experts": 4}, "active_experts"),
        ({"gated": 1}, "true or false"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(written(tmp_path, {"transformer": {**MODEL, **changes}}))


def test_a_transformer_counts_its_flops_and_bytes(tmp_path: Path) -> None:
    model, cluster = Transformer(**MODEL, flash=False), cluster_of(tmp_path)
    tokens, hidden = 2048, 1024
    block = 24 * tokens * hidden**2 + 4 * tokens**2 * hidden
    assert model.forward_flops() == 4 * block + 2 * tokens * hidden * 32000
    embedding, first, *_, head = model.costs(JobLayout(), cluster)
    assert first.parameters == 2 * 12 * hidden**2
    assert embedding.parameters == head.parameters == 2 * 32000 * hidden
    # 34 bytes for each value of the model's width, and 5 for each score, as Korthikanti et al. say.
    assert first.held == 34 * tokens * hidden + 5 * 16 * tokens**2
    halved = model.costs(JobLayout(tensor=2), cluster)[1]
    assert halved.parameters == first.parameters // 2
    assert halved.held == first.held // 2
    again = model.costs(JobLayout(recompute="full"), cluster)[1]
    assert again.whole == pytest.approx(first.whole + first.forward)
    assert again.held == 2 * tokens * hidden
    experts = Transformer(**MODEL, experts=8, active_experts=2, flash=False)
    assert experts.costs(JobLayout(expert=8), cluster)[1].parameters == first.parameters


def test_a_profile_scales_with_devices_and_rows(tmp_path: Path) -> None:
    profile = even(4)
    content = {**json.loads(profile.dumps()), "rows": 2}
    model = read_model(written(tmp_path, content))
    assert isinstance(model, MeasuredModel)
    with pytest.raises(ConfigError, match="profiled"):
        model.costs(JobLayout(), cluster_of(tmp_path))
    cluster = cluster_of(tmp_path, profiled=1e12)
    layer, scaled = profile.layers[0], model.costs(JobLayout(micro_batch=4), cluster)[0]
    assert scaled.forward == pytest.approx(2 * layer.forward * 1e12 / 1e13)
    assert scaled.held == 2 * layer.held
    assert scaled.parameters == layer.parameters
    again = model.costs(JobLayout(micro_batch=4, recompute="full"), cluster)[0]
    assert again.held == 2 * (layer.held - layer.saved)
    assert not model.fits(JobLayout(tensor=2))


def test_links_are_those_of_a_profile(tmp_path: Path) -> None:
    assert cluster_of(tmp_path).inside == Link(1e-5, 1 / 2e11)


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
    assert schedule_on_two_ranks(name, chunks).splits_backward == whole.splits_backward
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


#: By table: rows that are predicted, and at most the median and the worst error, in percent.
REACHED = {
    "megatron": (15, 3.0, 8.0),
    "recompute": (8, 4.5, 11.5),
    "zero-bubble": (114, 4.0, 11.0),
    "controllable-memory": (4, 7.5, 14.0),
    "llama3": (2, 4.0, 6.0),
    "vtrain": (108, 3.5, 52.0),
    "zero3": (5, 35.0, 90.0),
}

#: Chunks of a rank under 1F1B-I, by the model.
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_predictions_are_as_near_as_said(table: object) -> None:
    assert isinstance(table, type(TABLES[0]))
    cluster, made = predictions(table)
    good = summary(made)
    count, median, worst = REACHED[table.name]
    assert good.rows == count
    assert good.median <= median
    assert good.worst <= worst
    assert [one.calibrated for one in made].count(True) == 1
    assert all(len(curve) == 1 for curve in cluster.flops.values())
    if table.name == "zero-bubble":
        assert good.ranked >= 0.9 * good.pairs > 100
        errors = [
            abs(one.estimate.peak / 1e9 / float(one.row["memory_gb"]) - 1)
            for one in made
            if one.row["memory_gb"] and one.row["schedule"] in ("1F1B", "ZB-1p", "ZB-V")
        ]
        assert len(errors) > 50
        assert statistics.median(errors) < 0.2


def test_simulated_bubbles_are_the_published_ones() -> None:
    for row in rows("zero_bubble_bubbles"):
        ranks, micro_batches = int(row["ranks"]), int(row["micro_batches"])
        times = [float(row[name]) for name in ("forward", "input_grad", "weight_grad")]
        comm = float(row["comm"])
        # The paper counts fewer latencies: those from the last rank back to the first are left out.
        for name, column, chunks, uncounted in (
            ("1F1B", "1F1B", 1, 0.0),
            ("ZBH1", "ZB-H1", 1, 0.0),
            ("ZBH2", "ZB-H2", 1, 0.0),
            ("Interleaved1F1B", "1F1B-I", CHUNKS[row["model"]], ranks * comm),
        ):
            costs = Costs(*(time / chunks for time in times), comm=comm)
            schedule = build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
            rate = 1 - micro_batches * sum(times) / (schedule.simulate(costs).span - uncounted)
            assert rate == pytest.approx(float(row[column]), abs=1e-4), (row, name)


@pytest.mark.parametrize("stages", [8, 16])
def test_bubbles_are_those_of_dual_pipe(stages: int) -> None:
    forward, input_grad, weight_grad = 3.0, 3.0, 2.0
    backward, fused = input_grad + weight_grad, 8.0  # a pair takes as long as its parts
    for row in rows("dualpipe"):
        if row["method"] == "DualPipe":  # two copies of the parameters: none of fleetpipe's
            continue
        vee = row["method"] == "DualPipeV"
        name = {"ZB1P": "ZBH1"}.get(row["method"], row["method"])
        costs = Costs(forward, input_grad, weight_grad, overlapped=fused)
        schedule = build(name, ranks=stages // 2 if vee else stages, micro_batches=3 * stages)
        figures = {key: float(row[key]) for key in ("f_plus_b", "fused", "backward", "weight_grad")}
        bubble = (stages / float(row["of"]) - 1) * (
            figures["f_plus_b"] * (forward + backward)
            + figures["fused"] * fused
            + figures["backward"] * backward
            + figures["weight_grad"] * weight_grad
        )
        assert schedule.simulate(costs).bubble == pytest.approx(bubble), name
