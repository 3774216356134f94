"""Adapters beside frozen layers have the bits of the same formula in plain Paddle.

So have runs whose stages train nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

import fleetpipe
from fleetpipe import fleet, lora
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.dygraph.models import WIDTH
from tests.dygraph.models import FeedForward as Block
from tests.pipelines import CLASSES, FEATURES, accumulate, batch, bits, job, pipeline

RANK, ALPHA, STEPS, MICRO_BATCHES = 2, 6, 3, 4


class Net(nn.Sequential):
    """The plain model, under the names of the list."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))


def described() -> list[Any]:
    first, last = (FEATURES, WIDTH), (WIDTH, CLASSES)
    blocks = [LayerDesc(Block), LayerDesc(Block)]
    return [LayerDesc(nn.Linear, *first), *blocks, LayerDesc(nn.Linear, *last)]


def layers() -> list[Any]:
    adapted: list[Any] = lora.adapt(described(), ["up", "2.down"], RANK, ALPHA)
    return adapted


class Formula(nn.Layer):
    """The adapted model written by hand: of ``state`` the adapters are parameters."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.weights = state
        for name in filter(lambda name: "lora" in name, state):
            value = nn.initializer.Assign(state[name])
            trained = self.create_parameter(state[name].shape, default_initializer=value)
            self.add_parameter(name.replace(".", "-"), trained)
            self.weights[name] = trained

    def linear(self, x: Any, path: str) -> Any:
        w = self.weights
        out = F.linear(x, w[f"{path}.weight"], w[f"{path}.bias"])
        if f"{path}.lora_A.weight" not in w:
            return out
        low = paddle.matmul(x, w[f"{path}.lora_A.weight"])
        return out + paddle.matmul(low, w[f"{path}.lora_B.weight"]) * (ALPHA / RANK)

    def forward(self, x: Any) -> Any:
        x, w = self.linear(x, "0"), self.weights
        for path in "12":
            normal = F.layer_norm(x, [WIDTH], w[f"{path}.norm.weight"], w[f"{path}.norm.bias"])
            x = x + self.linear(F.gelu(self.linear(normal, f"{path}.up")), f"{path}.down")
        return self.linear(x, "3")


def adamw(parameters: Any) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.05)
    return paddle.optimizer.AdamW(0.05, parameters=parameters, weight_decay=0.1, grad_clip=clip)


def train_plainly(
    model: Any, steps: int, before: Callable[[int], object] = lambda step: None
) -> None:
    """Trains in a loop of plain Paddle; ``before`` is called with each step."""
    optimizer = adamw(model.parameters())
    for step in range(steps):
        before(step)
        parts = zip(*(part.split(MICRO_BATCHES) for part in batch(MICRO_BATCHES, step)))
        accumulate(F.cross_entropy(model(x), y) / MICRO_BATCHES for x, y in parts)
        optimizer.step()
        optimizer.clear_grad()


def by_hand(state: dict[str, Any]) -> dict[str, bytes]:
    """Returns what the formula ends with."""
    model = Formula({name: value.clone() for name, value in state.items()})
    train_plainly(model, STEPS)
    return bits(model.weights)


def train(
    model: Any, steps: range = range(STEPS), folder: Any = None, restored: bool = False
) -> dict[str, bytes]:
    """Returns what a wrapped pipeline ends with; it saves what it trains, or begins from there."""
    optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
    saver = fleetpipe.CheckpointManager(folder) if folder else None
    part = lora.TrainedPart(model)
    if saver and restored:
        saver.restore(steps.start, model=part, optimizer=optimizer)
    for step in steps:
        model.train_batch(batch(MICRO_BATCHES, step), optimizer)
    assert all((p.grad is None) or not p.stop_gradient for p in model.parameters())
    if saver:
        saver.save(steps.stop, model=part, optimizer=optimizer)
    state = optimizer.state_dict()
    frozen = [p.name for p in model.parameters() if p.stop_gradient]
    assert not [name for name in state if any(name.startswith(f"{p}_") for p in frozen)]
    return bits(model.layers.full_state_dict())


@pytest.mark.parametrize(
    ("pp", "schedule", "options", "configs"),
    [
        (2, "1F1B", {}, {}),
        (4, "ZBH1", {}, {}),
        (2, "ZBV", {}, {}),
        (4, "1F1B", {"recompute_interval": 1}, {}),
        (2, "ZBH2", {"recompute_interval": 1}, {}),
        (2, "ZBH1", {}, {"order": "ready"}),
    ],
)
def test_a_list_of_layers(
    pp: int, schedule: str, options: dict[str, Any], configs: dict[str, Any]
) -> None:
    with job(pp, MICRO_BATCHES, schedule, **configs):
        paddle.seed(0)
        if options:
            options = {**options, "recompute_ctx": {}}
        model = pipeline(layers(), **options)
        for name, parameter in model.layers.named_parameters():
            if "lora_B" in name:  # else lora_A gets no gradient in the first step
                parameter.set_value(paddle.full(parameter.shape, 0.1))
        begin = model.layers.full_state_dict()
        trained = train(model)
    assert trained == by_hand(begin)
    assert {name for name in trained if trained[name] != begin[name].numpy().tobytes()} == {
        f"{path}.lora_{factor}.weight" for path in ("1.up", "2.up", "2.down") for factor in "AB"
    }


def test_a_captured_model() -> None:
    with job(2, MICRO_BATCHES, "ZBH1"):
        net = lora.adapt(Net(), ["up", "2.down"], RANK, ALPHA)
        begin = {name: value.clone() for name, value in net.state_dict().items()}
        example = paddle.ones([2, FEATURES])
        pipe = fleetpipe.pipeline(net, example, nn.CrossEntropyLoss(), split_spec=["2"])
        assert train(fleet.distributed_model(pipe)) == by_hand(begin)


def test_adapters_are_saved_alone_and_merged(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    with job(1, MICRO_BATCHES):
        begin = pipeline(layers()).layers.full_state_dict()
    expected = by_hand(begin)
    ranks = on_ranks(_on_a_rank, 2, str(tmp_path))
    assert ranks == [expected, expected]
    with job(4, MICRO_BATCHES, "ZBH1"):
        assert train(pipeline(layers()), range(2, STEPS), tmp_path / "run", True) == expected
    net = lora.adapt(Net(), ["up", "2.down"], RANK, ALPHA)
    fleetpipe.load_single(lora.BasePart(net), tmp_path / "base")
    assert fleetpipe.load_single(lora.TrainedPart(net), tmp_path / "run") == STEPS
    assert bits(net.state_dict()) == expected
    x, _ = batch()
    unmerged, low, high = net(x), net[1].up.lora_A.weight, net[1].up.lora_B.weight
    weight = net[1].up.weight + paddle.matmul(low, high) * (ALPHA / RANK)
    assert {*map(type, lora.merge(net).sublayers())} == {nn.Linear, nn.LayerNorm, Block}
    assert net.state_dict().keys() == Net().state_dict().keys()
    assert net[1].up.weight.numpy().tobytes() == weight.numpy().tobytes()
    np.testing.assert_allclose(net(x).numpy(), unmerged.numpy(), rtol=1e-3)


def _on_a_rank(folder: str) -> dict[str, bytes]:
    with job(2, MICRO_BATCHES):
        fleetpipe.CheckpointManager(folder + "/base").save(0, model=pipeline(described()))
        train(pipeline(layers()), range(2), folder + "/run")
        return train(pipeline(layers()), range(2, STEPS), folder + "/run", True)


@pytest.mark.parametrize("other", [{"targets": ["up", "1.down"]}, {"alpha": ALPHA + 1}])
def test_adapters_of_other_layers_or_of_another_scale_are_refused(
    other: dict[str, Any], tmp_path: Path
) -> None:
    options = {"targets": ["up", "2.down"], "rank": RANK, "alpha": ALPHA}
    net = lora.adapt(Net(), **options)
    fleetpipe.CheckpointManager(tmp_path).save(1, model=lora.TrainedPart(net))
    changed = lora.adapt(Net(), **{**options, **other})
    before = bits(changed.state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint has (other )?adapters"):
        fleetpipe.load_single(lora.TrainedPart(changed), tmp_path)
    assert bits(changed.state_dict()) == before
    alike = lora.adapt(Net(), **{**options, "targets": ["1.up", "2.up", "2.down"]})
    assert fleetpipe.load_single(lora.TrainedPart(alike), tmp_path) == 1


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "last",
    [
        lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: Doubled(3, 3),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(last: Any) -> None:
    for model in (nn.Sequential(nn.Linear(2, 3), last()), [nn.Linear(2, 3), last()]):
        with pytest.raises(ConfigError, match="takes no adapter"):
            lora.adapt(model, ["0", "1"])
        assert all(not p.stop_gradient for layer in model for p in layer.parameters())
        assert type(model[0]) is nn.Linear


def test_an_adapted_model_becomes_a_program() -> None:
    net = lora.adapt(Net(), ["up"], RANK)
    x, _ = batch()
    expected = net(x)
    program = paddle.jit.to_static(net, full_graph=True)
    np.testing.assert_allclose(program(x).numpy(), expected.numpy(), rtol=1e-6)


def tied(net: Any) -> Any:
    net[2].up.weight = net[1].up.weight
    return net


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (lambda: [LayerDesc(Block)], ["up", "dwon"], "dwon"),
        (Net, [], "no targets"),
        (Net, ["norm"], "a LayerNorm"),
        (lambda: lora.adapt(Net(), ["up"]), ["down"], "adapters already"),
        (lambda: lora.adapt([LayerDesc(Block)], ["up"]), ["down"], "adapters already"),
        (lambda: tied(Net()), ["up"], "several layers use"),
        (lambda: [SharedLayerDesc("key", Block)], ["up"], "several layers use"),
        (lambda: PipelineLayer([LayerDesc(Block)], num_stages=1), ["up"], "before it is cut"),
    ],
)
def test_what_takes_no_adapter_is_refused(model: Any, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora.adapt(model(), targets)


@pytest.mark.parametrize("alpha", [0, -8, float("nan"), float("inf")])
def test_a_scale_that_trains_nothing_or_is_no_number_is_refused(alpha: float) -> None:
    net = Net()
    with pytest.raises(ConfigError, match=f"alpha={alpha}"):
        lora.adapt(net, ["up"], RANK, alpha)
    assert all(not p.stop_gradient for p in net.parameters())


def test_what_was_trained_beside_the_adapters_is_asked_for_by_name(tmp_path: Path) -> None:
    nets = [lora.adapt(Net(), ["up"], RANK) for _ in range(2)]
    for parameter in nets[0][3].parameters():
        parameter.stop_gradient = False
    fleetpipe.CheckpointManager(tmp_path).save(1, model=lora.TrainedPart(nets[0]))
    with pytest.raises(CheckpointError, match=r"(?s)3.weight, 3.bias.*stop_gradient = False"):
        fleetpipe.load_single(lora.TrainedPart(nets[1]), tmp_path)


STEPS_OF_ALL_PARTS = 4
#: What is trained at first, and from the third step on: the beginnings of names.
PARTS = {
    "the head": (("3.",), ("3.",)),
    "the first layer": (("0.",), ("0.",)),
    "a layer between": (("1.up",), ("1.up",)),
    "biases of both ends": (("0.bias", "3.bias"), ("0.bias", "3.bias")),
    "the head, then more": (("3.",), ("1.", "3.")),
    "the first layer, then the head": (("0.",), ("3.",)),
}
#: Schedules with ranks, and options of the layers and of the job.
RUNS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (4, "1F1B", {}, {}),
    (4, "ZBH1", {"recompute_interval": 1, "recompute_ctx": {}}, {}),
    (2, "ZBV", {}, {"order": "ready"}),
]


def train_alone(named: Any, beginnings: tuple[str, ...]) -> None:
    for name, parameter in named:
        parameter.stop_gradient = not name.startswith(beginnings)


def plainly(begin: dict[str, Any], parts: tuple[tuple[str, ...], ...]) -> dict[str, bytes]:
    model = Net()
    model.set_state_dict(begin)
    train_plainly(
        model,
        STEPS_OF_ALL_PARTS,
        lambda step: train_alone(model.named_parameters(), parts[step // 2]),
    )
    return bits(model.state_dict())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run[1])
@pytest.mark.parametrize("parts", PARTS)
def test_a_run_goes_on_in_another_layout(parts: str, run: Any, tmp_path: Path) -> None:
    """Two steps, then two more of a restored run, with another optimizer list."""
    (ranks, schedule, options, own), trained = run, PARTS[parts]
    manager = fleetpipe.CheckpointManager(tmp_path)
    begin: dict[str, Any] = {}
    for half, pp in enumerate((2, ranks)):
        with job(pp, MICRO_BATCHES, schedule if half else "1F1B", **own):
            paddle.seed(0)
            model = pipeline(described(), **options)
            begin = begin or model.layers.full_state_dict()
            train_alone(model.layers.named_parameters(), trained[half])
            parameters = model.parameters()
            if trained[0] == trained[1] and half:
                parameters = [p for p in parameters if not p.stop_gradient]
            optimizer = fleet.distributed_optimizer(adamw(parameters))
            if half:
                manager.restore(model=model, optimizer=optimizer)
            for step in (2 * half, 2 * half + 1):
                model.train_batch(batch(MICRO_BATCHES, step), optimizer)
            manager.save(step, model=model, optimizer=optimizer)
            state = bits(model.layers.full_state_dict())
    assert state == plainly(begin, trained)
