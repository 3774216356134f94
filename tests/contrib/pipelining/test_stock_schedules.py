"""Schedules of ``paddle.distributed.auto_parallel.pipelining`` on the engine, in bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.launch.substitution import in_place_of_paddles

pytestmark = pytest.mark.skipif(
    paddle.version.full_version.startswith("2."), reason="2.6.2 has no auto_parallel.pipelining"
)

MICRO_BATCHES = 4
PACKAGE = "paddle.distributed.auto_parallel.pipelining"
LOSS = nn.MSELoss()


def paddles(name: str) -> Any:
    for module in ("schedules", "stage"):
        found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(name)


@pytest.fixture
def substituted() -> Iterator[None]:
    with in_place_of_paddles():
        yield


def blocks(number: int = 4) -> list[Any]:
    paddle.seed(7)
    return [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(number)]


def data(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    x, y = (paddle.to_tensor(rng.random((8, 8)).astype("float32")) for _ in "xy")
    return x, y


def adam(layers: list[Any]) -> Any:
    return paddle.optimizer.AdamW(
        0.01, parameters=[one for layer in layers for one in layer.parameters()]
    )


def noted(layers: list[Any]) -> list[bytes]:
    """Returns the bits of all gradients and parameters."""
    tensors = [tensor for layer in layers for tensor in layer.parameters()]
    return [t.numpy().tobytes() for one in tensors for t in (one.grad, one)]


def trained_plainly(
    layers: list[Any], steps: int = 2
) -> tuple[list[float], list[list[list[bytes]]]]:
    """Trains the layers as one model; returns losses, and gradients and parameters by layer."""
    optimizer, states = adam(layers), []
    losses: list[float] = []
    for step in range(steps):
        inputs, target = data(step)
        for x, y in zip(*(paddle.split(part, MICRO_BATCHES) for part in (inputs, target))):
            loss = LOSS(nn.Sequential(*layers)(x), y)
            losses.append(float(loss))
            loss.backward()
        states.append([noted([layer]) for layer in layers])
        optimizer.step()
        optimizer.clear_grad()
    return losses, states


def trained(schedule: Any, layers: list[Any], steps: int = 2) -> tuple[Any, Any, Any]:
    """Trains the layers of this process; returns losses, states by layer, and the last output."""
    optimizer, output = adam(layers), None
    losses: list[float] = []
    states: list[list[list[bytes]]] = []
    for step in range(steps):
        inputs, target = data(step)
        taken: list[Any] = []
        output = schedule.step(inputs, target=target, losses=taken, return_output=True)
        losses += map(float, taken)
        states.append([noted([layer]) for layer in layers])
        optimizer.step()
        optimizer.clear_grad()
    return losses, states, output


def stages(ranks: int, rank: int, chunks: int, group: Any = None) -> list[Any]:
    """Returns a rank's stages, of one block each."""
    layers = blocks(ranks * chunks)
    numbers = range(rank, ranks * chunks, ranks)
    build = paddles("PipelineStage")
    return [build(layers[n], n, ranks * chunks, group=group) for n in numbers]


@pytest.mark.usefixtures("substituted")
def test_an_order_of_a_users_own_runs_with_a_split_backward() -> None:
    own = stages(1, 0, 2)
    schedule = paddles("PipelineScheduleMulti")(own, 2, loss_fn=LOSS)
    actions = importlib.import_module(f"{PACKAGE}.schedules")
    order = [(0, "F", 0), (1, "F", 0), (1, "I", 0), (0, "I", 0), (0, "F", 1), (1, "F", 1)]
    order += [(1, "W", 0), (1, "B", 1), (0, "B", 1), (0, "W", 0)]
    schedule.pipeline_order = {
        0: [actions._Action(s, actions._ActType.from_str(kind), k) for s, kind, k in order]
    }
    seen: list[str] = []
    for stage in own:
        stage.sublayer.register_forward_post_hook(
            lambda layer, *_, number=stage.stage_index: seen.append(f"F{number}")
        )
    inputs, target = data(0)
    schedule.step(inputs, target=target)
    assert seen == ["F0", "F1"] * 2
    plain = blocks(2)
    for x, y in zip(*(paddle.split(part, 2) for part in (inputs, target))):
        LOSS(nn.Sequential(*plain)(x), y).backward()
    assert noted([one.sublayer for one in own]) == noted(plain)


@pytest.mark.usefixtures("substituted")
def test_without_a_loss_outputs_are_joined() -> None:
    own = stages(1, 0, 2)
    schedule = paddles("ScheduleVPP")(own, MICRO_BATCHES)
    inputs, _ = data(0)
    output = schedule.step(inputs, return_output=True)
    parts = paddle.split(inputs, MICRO_BATCHES)
    expected = paddle.concat([nn.Sequential(*blocks(2))(part) for part in parts])
    assert output.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.usefixtures("substituted")
def test_what_cannot_run_is_refused_by_name() -> None:
    own = stages(1, 0, 2)
    with pytest.raises(ConfigError, match=r"(?s)was given no target.*target=labels"):
        paddles("ScheduleVPP")(own, MICRO_BATCHES, loss_fn=LOSS).step(data(0)[0])
    single = paddles("Schedule1F1B")
    with pytest.raises(ConfigError, match=r"other stages than its own"):
        single(own[0], MICRO_BATCHES, loss_fn=LOSS).step(data(0)[0], target=data(0)[1])
    stock = paddles("PipelineScheduleSingle")
    odd = type("Odd", (stock,), {"_step_microbatches": lambda self, *_: self._initialize_stage()})
    with pytest.raises(ConfigError, match=r"(?s)^Odd exchanges.*pipeline_order"):
        odd(own[0], MICRO_BATCHES, loss_fn=LOSS).step(data(0)[0])


def test_afterwards_paddles_own_runs() -> None:
    schedules = importlib.import_module(f"{PACKAGE}.schedules")
    stock = schedules.Schedule1F1B._step_microbatches
    with in_place_of_paddles():
        assert schedules.Schedule1F1B._step_microbatches is not stock
    assert schedules.Schedule1F1B._step_microbatches is stock


def _model(rank: int, group: Any) -> Any:
    """What ``get_pipeline_schedule`` takes: layers of one tuple, for four stages."""

    class Layer(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, values: Any) -> Any:
            return self.linear(values[0]), *values[1:]

    paddle.seed(7)
    layers = nn.LayerList([Layer() for _ in range(4)])
    config = SimpleNamespace(num_hidden_layers=4, virtual_pp_degree=2)
    return SimpleNamespace(layers=layers, config=config)


def _shared(rank: int, group: Any) -> list[bytes]:
    """Returns the gradient of a weight that two stages share, on a mesh of one rank for each."""
    mesh = dist.ProcessMesh([0, 1], dim_names=["pp"])
    layers = blocks(2)
    for number, layer in enumerate(layers):
        layer[0].weight = dist.shard_tensor(layer[0].weight, mesh[number], [dist.Replicate()])
    pair = {"params": [layer[0].weight for layer in layers]}
    stage = paddles("PipelineStage")(layers[rank], rank, 2, group=group, shared_parameters=[pair])
    inputs, target = data(0)
    paddles("ScheduleFThenB")(stage, 1, loss_fn=LOSS).step(inputs, target=target)
    return [layers[rank][0].weight.grad._local_value().numpy().tobytes()]


def train_on_two_ranks() -> dict[str, Any]:
    """Trains under each schedule, with nothing but Paddle's own calls."""
    with in_place_of_paddles():
        dist.init_parallel_env()
        rank, group = dist.get_rank(), dist.new_group([0, 1])
        results: dict[str, Any] = {}
        for name in ("ScheduleFThenB", "Schedule1F1B", "ScheduleVPP"):
            own = stages(2, rank, 2 if name == "ScheduleVPP" else 1, group)
            schedule = paddles(name)(
                own if name == "ScheduleVPP" else own[0], MICRO_BATCHES, loss_fn=LOSS
            )
            results[name] = trained(schedule, [one.sublayer for one in own])[:2]
        model = _model(rank, group)
        schedule = paddles("get_pipeline_schedule")(model, MICRO_BATCHES, LOSS, "VPP", 2, group)
        inputs, target = data(0)
        schedule.step(input_ids=inputs, target=target)
        results["get_pipeline_schedule"] = noted([*model.layers[rank::2]])
        results["shared"] = _shared(rank, group)
        wrong = paddles("Schedule1F1B")(stages(2, rank, 1, group)[0], 2 + 2 * rank, loss_fn=LOSS)
        try:
            wrong.step(inputs, target=target)
        except (ConfigError, PeerFailed) as error:
            results["wrong"] = str(error)
        return results


def test_ranks_have_the_bits_of_the_plain_model(on_ranks: Callable[..., list[Any]]) -> None:
    results = on_ranks(train_on_two_ranks, 2)
    for name, number in (("ScheduleFThenB", 2), ("Schedule1F1B", 2), ("ScheduleVPP", 4)):
        losses, states = trained_plainly(blocks(number))
        assert [result[name][0] for result in results] == [[], losses]
        for rank, result in enumerate(results):
            assert result[name][1] == [state[rank::2] for state in states]
    plain = _model(0, None)
    for x, y in zip(*(paddle.split(part, MICRO_BATCHES) for part in data(0))):
        for layer in plain.layers:
            x = layer([x])[0]
        LOSS(x, y).backward()
    parts = [result["get_pipeline_schedule"] for result in results]
    assert parts == [noted([*plain.layers[rank::2]]) for rank in range(2)]
    tied = blocks(2)
    tied[1][0].weight = tied[0][0].weight
    LOSS(nn.Sequential(*tied)(data(0)[0]), data(0)[1]).backward()
    gradient = tied[0][0].weight.grad.numpy().tobytes()
    assert [result["shared"] for result in results] == [[gradient]] * 2
    assert all("micro_batches=2" in result["wrong"] for result in results)
