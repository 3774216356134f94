"""What a file says of a cluster and of a model, and what products and exchanges take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.contrib.clusters import Cluster, JobLayout, Transformer
from fleetpipe.contrib.clusters.workload import MeasuredModel, read_model
from fleetpipe.errors import ConfigError
from fleetpipe.profiling import Link
from tests.profiling.models import even

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
