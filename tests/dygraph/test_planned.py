"""A list of layers that is built by a plan: what runs, what is recomputed, and what is refused."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.device import allocated_bytes
from fleetpipe.profiling import LayerCost, Profile, plan
from tests.jobs import job
from tests.pipelines import batch, bits, mlp_layers, model_in_job, pipeline, sgd

M = 4


def names() -> list[str]:
    """The names of the layers of the model."""
    return ["Linear", nn.functional.tanh.__name__] * 3 + ["Linear"]


def costs(splits: bool = True, held: int = 0) -> Profile:
    """A profile of the model, with costs by hand: the last layer takes longest."""
    parts = {"input_grad": 1.0, "weight_grad": 1.0} if splits else {}
    layers = [
        LayerCost(name, 1.0 + 4 * (i == 6), 2.0, output=8, held=held, saved=held // 2, **parts)  # type: ignore[arg-type]
        for i, name in enumerate(names())
    ]
    return Profile(tuple(layers))


def trained(**options: Any) -> dict[str, bytes]:
    """The bits of all parameters after two steps."""
    model = pipeline(mlp_layers(), **options)
    optimizer = sgd(model)
    for seed in range(2):
        model.train_batch(batch(M, seed), optimizer)
    return bits(model.layers.full_state_dict())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("splits", [True, False])
def test_a_planned_model_trains_to_the_same_bits(ranks: int, splits: bool, tmp_path: Path) -> None:
    made = plan(costs(splits, held=100), ranks, M, memory_cap=600)
    made.write(tmp_path / "plan.json")
    with job(ranks, micro_batches=M):
        expected = trained()
        for given in (made, tmp_path / "plan.json"):
            model = pipeline(mlp_layers(), plan=given)
            assert model.layers.partition.boundaries == made.partition.boundaries
            assert model.schedule == made.schedule
            assert trained(plan=given) == expected


def test_another_number_of_micro_batches_may_follow() -> None:
    made = plan(costs(), 2, M)
    with model_in_job(2, micro_batches=M, layers=mlp_layers(), plan=made) as model:
        optimizer = sgd(model)
        model.train_batch(batch(M), optimizer)
        model.accumulate_steps = M - 1
        assert float(model.train_batch(batch(M - 1), optimizer)) > 0
        assert model.schedule.micro_batches == M - 1


@pytest.fixture
def blocks() -> list[Any]:
    """Descriptions of layers that hold much."""
    block = LayerDesc(nn.TransformerEncoderLayer, 6, 2, 2048, dropout=0.0)
    return [LayerDesc(nn.Linear, 6, 6), block, block, LayerDesc(nn.Linear, 6, 4)]


def test_what_the_plan_recomputes_is_not_held(blocks: Any) -> None:
    data = [paddle.rand([M * 2, 3, 6]), paddle.zeros([M * 2, 3, 1], "int64")]
    with model_in_job(1, micro_batches=M, layers=blocks) as model:
        profile = model.profile(data)
        assert [layer.saved > 0 for layer in profile.layers] == [False, True, True, False]
        # Of the schedule that both have: times measured beside other programs choose another one.
        chosen = functools.partial(plan, profile, 1, M, search=("recompute",), optimizer_copies=0)
        free = chosen()
        [peak] = free.predicted.peak_bytes
        half = chosen(memory_cap=peak - profile.layers[1].saved // 2)
        before, after = (_held(pipeline(blocks, plan=made), data) for made in (free, half))
        assert half.recompute[0]
        saved = sum(profile.layers[layer].saved for layer in half.recompute[0])
        assert before - after == pytest.approx(saved, rel=0.02)


def _held(model: Any, data: list[Any]) -> int:
    """The bytes that a forward leaves, before its backward."""
    layers = model.layers
    layers.train()
    value = data[0][:2]
    value.stop_gradient = False
    gc.collect()
    before = allocated_bytes()
    output = layers.owned_stages.function(0)(value, None)
    held = allocated_bytes() - before
    del output
    return held


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seg_method": "balanced"}, "leave seg_method"),
        ({"recompute_interval": 1, "recompute_ctx": {}}, "leave seg_method"),
        ({"num_virtual_pipeline_stages": 3}, "num_virtual_pipeline_stages=3"),
        ({"use_dualpipev": True}, "use_dualpipev=True"),
        ({"layers": mlp_layers(blocks=2)}, "number of layers"),
        ({"plan": "nowhere.json"}, "No such file"),
    ],
)
def test_what_contradicts_a_plan_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"plan": plan(costs(), 2, M), **options}
    with job(2, micro_batches=M), pytest.raises(ConfigError, match=message):
        pipeline(given.pop("layers", mlp_layers()), **given)


def test_a_plan_for_other_ranks_or_micro_batches_or_schedules_is_refused() -> None:
    made = plan(costs(), 2, M)
    with job(2, micro_batches=8), pytest.raises(ConfigError, match="accumulate_steps=8"):
        pipeline(mlp_layers(), plan=made)
    ranks = r"(?s)expected: 2 ranks.*3 ranks"
    with job(3, micro_batches=M), pytest.raises(ConfigError, match=ranks):
        pipeline(mlp_layers(), plan=made)
    other = "FThenB" if made.schedule.name != "FThenB" else "ZBH1"
    with job(2, M, other), pytest.raises(ConfigError, match=f"schedule_mode='{other}'"):
        pipeline(mlp_layers(), plan=made)


def test_what_is_no_plan_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"(?s)no plan of fleetpipe's.*got: Profile")
    with job(2, micro_batches=M), refused:
        pipeline(mlp_layers(), plan=costs())


def test_a_plan_does_not_lift_the_memory_cap_of_the_strategy() -> None:
    made = plan(costs(splits=False), 2, M)
    most = max(made.schedule.simulate().peak_activations)
    with job(2, micro_batches=M, memory_cap=most):
        trained(plan=made)
    with (
        job(2, micro_batches=M, memory_cap=most - 1),
        pytest.raises(ScheduleError, match="passes the memory cap"),
    ):
        pipeline(mlp_layers(), plan=made)
