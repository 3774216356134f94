"""Optimizers of a pipeline against Paddle's own on the single model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import (
    HybridParallelOptimizer,
)

from fleetpipe import fleet, log
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleetpipe.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from tests.dygraph.models import ScaledLoss
from tests.pipelines import (
    ROWS,
    adam,
    batch,
    begun,
    bits,
    job,
    mlp_and_sgd,
    mlp_layers,
    pipeline,
    sgd,
)

Make = Callable[[list[Any]], Any]
optimizers = paddle.optimizer


def single_step(model: Any, optimizer: Any, data: Any, loss_of: Any, pieces: int = 4) -> None:
    """Trains a single model on the micro-batches of a batch."""
    for number in range(pieces):
        inputs, labels = (tensor[number * ROWS : (number + 1) * ROWS] for tensor in data)
        (loss_of(model(inputs), labels) * (1 / pieces)).backward()
    optimizer.step()
    optimizer.clear_grad()


def assert_same_training(make: Make, schedule: str = "1F1B") -> Any:
    """Trains a pipeline in one process and the single model; returns the pipeline's optimizer."""
    with job(3, schedule=schedule):
        model = pipeline()
        single = model.layers.single_model()
        single.set_state_dict(model.layers.full_state_dict())
        optimizer = fleet.distributed_optimizer(make(model.parameters()))
        theirs = make(single.parameters())
        start = bits(single.state_dict())
        for step in range(3):
            data = batch(seed=step)
            model.train_batch(data, optimizer)
            single_step(single, theirs, data, nn.functional.cross_entropy)
            assert bits(model.layers.full_state_dict()) == bits(single.state_dict()), step
        assert all(value != start[name] for name, value in bits(single.state_dict()).items())
    return optimizer


class Halved(nn.ClipGradByNorm.__base__):  # type: ignore[misc,name-defined]
    """A clip of a script's own, without a text."""

    def _dygraph_clip(self, pairs: list[Any]) -> list[Any]:
        return [(parameter, gradient * 0.5) for parameter, gradient in pairs]


def clipped_but_the_first(parameters: list[Any]) -> Any:
    parameters[0].need_clip = False
    return OPTIMIZERS["a global norm"](parameters)


OPTIMIZERS: dict[str, Make] = {
    "a clip of its own": lambda p: optimizers.SGD(0.1, parameters=p, grad_clip=Halved()),
    "SGD": lambda p: optimizers.SGD(0.1, parameters=p, weight_decay=0.01),
    "Momentum": lambda p: optimizers.Momentum(0.1, parameters=p, use_nesterov=True),
    "Adam": lambda p: optimizers.Adam(0.01, parameters=p),
    "AdamW": lambda p: optimizers.AdamW(0.01, parameters=p, weight_decay=0.1),
    "Adamax": lambda p: optimizers.Adamax(0.01, parameters=p),
    "Adagrad": lambda p: optimizers.Adagrad(0.1, parameters=p),
    "Adadelta": lambda p: optimizers.Adadelta(0.5, parameters=p),
    "RMSProp": lambda p: optimizers.RMSProp(0.01, parameters=p, centered=True),
    "Lamb": lambda p: optimizers.Lamb(0.01, parameters=p),
    "a global norm": lambda p: optimizers.Adam(
        0.01, parameters=p, grad_clip=nn.ClipGradByGlobalNorm(0.1)
    ),
    "a global norm of all but one": clipped_but_the_first,
    "a global norm that is not reached": lambda p: optimizers.Adam(
        0.01, parameters=p, grad_clip=nn.ClipGradByGlobalNorm(1e3)
    ),
    "a global norm only where it is passed": lambda p: optimizers.Adam(
        0.01, parameters=p, grad_clip=nn.ClipGradByGlobalNorm(1.0, auto_skip_clip=True)
    ),
    "a norm for each": lambda p: optimizers.SGD(
        0.1, parameters=p, grad_clip=nn.ClipGradByNorm(0.05)
    ),
    "a largest value": lambda p: optimizers.SGD(
        0.1, parameters=p, grad_clip=nn.ClipGradByValue(0.01)
    ),
}


# Not in Paddle 2.6.2.
NEWER: dict[str, Make] = {
    "NAdam": lambda p: optimizers.NAdam(0.01, parameters=p),
    "RAdam": lambda p: optimizers.RAdam(0.01, parameters=p),
    "ASGD": lambda p: optimizers.ASGD(0.1, batch_num=2, parameters=p),
    "Rprop": lambda p: optimizers.Rprop(0.01, parameters=p),
}
OPTIMIZERS.update({name: make for name, make in NEWER.items() if hasattr(optimizers, name)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_and_clip_trains_as_on_one_device(name: str) -> None:
    assert_same_training(OPTIMIZERS[name])


def in_groups(parameters: list[Any]) -> Any:
    """Weights and biases with rates, decay and clips of their own."""
    return optimizers.AdamW(
        0.01,
        parameters=[
            {"params": [p for p in parameters if len(p.shape) > 1], "weight_decay": 0.2},
            {
                "params": [p for p in parameters if len(p.shape) == 1],
                "learning_rate": 0.5,
                "grad_clip": nn.ClipGradByNorm(0.02),
            },
        ],
        grad_clip=nn.ClipGradByGlobalNorm(0.1),
    )


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_parameter_groups_keep_their_options(schedule: str) -> None:
    optimizer = assert_same_training(in_groups, schedule)
    # One group has a norm; that of the other is local.
    assert optimizer.gradient_norm > 0


def test_the_optimizer_is_fleets_to_the_outside() -> None:
    with job(2):
        model = pipeline()
        theirs = optimizers.Adam(0.01, parameters=model.parameters())
        optimizer = fleet.distributed_optimizer(theirs)
        assert isinstance(optimizer, HybridParallelOptimizer)
        assert optimizer._inner_opt is optimizer.wrapped is theirs
        assert optimizer.gradient_norm is None
        optimizer.set_lr(0.5)
        assert optimizer.get_lr() == theirs.get_lr() == 0.5
        assert optimizer._parameter_list is theirs._parameter_list
        model.forward_backward_pipeline(batch())
        assert model.parameters()[0].grad is not None
        before = bits(model.state_dict())
        _, pairs = optimizer.minimize(paddle.zeros([]))
        assert len(pairs) == len(model.parameters())
        assert all(value != before[name] for name, value in bits(model.state_dict()).items())
        optimizer.clear_grad(set_to_zero=False)
        assert model.parameters()[0].grad is None


@pytest.mark.parametrize("by", [lambda p: p, lambda p: p.name])
def test_minimize_updates_what_it_is_told_alone(by: Any) -> None:
    with job(2):
        model = pipeline()
        first, second, third, *others = model.parameters()
        clip = nn.ClipGradByGlobalNorm(0.1)
        optimizer = fleet.distributed_optimizer(
            optimizers.SGD(0.1, parameters=[second, third, *others], grad_clip=clip)
        )
        model.forward_backward_pipeline(batch())
        before = [p.numpy().tobytes() for p in model.parameters()]
        # None of the optimizer's: Paddle takes an empty list for all.
        assert optimizer.minimize(paddle.zeros([]), parameters=[by(first)]) == ([], [])
        assert [p.numpy().tobytes() for p in model.parameters()] == before
        _, pairs = optimizer.minimize(
            paddle.zeros([]), parameters=[by(second), by(third)], no_grad_set={by(third)}
        )
        assert [parameter.name for parameter, _ in pairs] == [second.name]
        after = [p.numpy().tobytes() for p in model.parameters()]
        assert [i for i, bytes_ in enumerate(after) if bytes_ != before[i]] == [1]


def test_layers_may_get_parameters_after_they_were_built() -> None:
    """As adapters do, which are trained while the rest is frozen."""
    norms = []
    for stages in (1, 2):
        with job(stages):
            layers = PipelineLayer(mlp_layers(), num_stages=stages, loss_fn=nn.CrossEntropyLoss())
            for parameter in layers.parameters():
                parameter.stop_gradient = True
            for layer in [part for part in layers.sublayers() if isinstance(part, nn.Linear)]:
                one = nn.initializer.Constant(1.0)
                layer.adapter = layer.create_parameter([1], default_initializer=one)
                layer.register_forward_post_hook(lambda part, _, y: y * part.adapter)
            clip = nn.ClipGradByGlobalNorm(0.01)
            adamw = optimizers.AdamW(0.1, parameters=layers.parameters(), grad_clip=clip)
            optimizer = fleet.distributed_optimizer(adamw)
            fleet.distributed_model(layers).train_batch(batch(), optimizer)
            norms.append(optimizer.gradient_norm)
    assert norms[0] > 0.01
    assert norms[0] == norms[1]


@pytest.mark.parametrize("groups", [False, True])
def test_an_optimizer_on_the_wrong_parameters_is_refused(groups: bool) -> None:
    with job(2):
        model = pipeline()
        other = [*nn.Linear(6, 8).parameters()]
        for parameters in (other, [*model.parameters(), *other]):
            listed = [{"params": parameters}] if groups else parameters
            theirs = optimizers.SGD(0.1, parameters=listed)
            with pytest.raises(ConfigError, match=f"wrong parameters(.|\n)*{other[0].name}"):
                model.train_batch(batch(), fleet.distributed_optimizer(theirs))
        frozen = nn.Linear(6, 8)
        for parameter in frozen.parameters():
            parameter.stop_gradient = True
        theirs = optimizers.SGD(0.1, parameters=frozen.parameters())
        with pytest.raises(ConfigError, match="none of them, 2 in all"):
            model.train_batch(batch(), fleet.distributed_optimizer(theirs))


def test_a_state_that_has_another_ranks_parameters_alone_is_refused() -> None:
    with job(2):
        models = pipeline(), pipeline()
        optimizers = [adam(model) for model in models]
        for model, optimizer in zip(models, optimizers):
            model.train_batch(batch(), optimizer)
        mine, other = (optimizer.state_dict() for optimizer in optimizers)
        with pytest.raises(ConfigError, match=r"of other parameters(?s:.*)load on each rank what"):
            optimizers[0].set_state_dict(other)
        optimizers[0].set_state_dict(mine)


def test_an_optimizer_of_the_models_loss_is_right() -> None:
    with job(2):
        loss = ScaledLoss()
        model = pipeline(loss_fn=loss)
        own = {id(p): p for p in [*model.parameters(), *loss.parameters()]}
        theirs = optimizers.SGD(0.1, parameters=list(own.values()))
        before = loss.scale.numpy().tobytes()
        model.train_batch(batch(), fleet.distributed_optimizer(theirs))
        assert loss.scale.numpy().tobytes() != before


def test_an_optimizer_that_needs_several_losses_in_a_step_is_refused() -> None:
    with job(2):
        model = pipeline()
        with pytest.raises(ConfigError, match="LBFGS"):
            fleet.distributed_optimizer(optimizers.LBFGS(parameters=model.parameters()))


def test_an_optimizer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        model.train_batch(batch(), optimizer)
        monkeypatch.setattr("fleetpipe.dygraph.optimizer.optimizer._require_no_foreign", None)
        model.train_batch(batch(), optimizer)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("wrap", ["discarded", "kept"])
def test_gradients_in_float32_of_a_mixed_precision_layer(schedule: str, wrap: str) -> None:
    def make(parameters: list[Any]) -> Any:
        return MixPrecisionOptimizer(OPTIMIZERS["a global norm"](parameters))

    with job(3, schedule=schedule):
        topology = fleet.get_hybrid_communicate_group().topology()
        layers = PipelineLayer(mlp_layers(), topology=topology, loss_fn=nn.CrossEntropyLoss())
        single = layers.single_model()
        single.set_state_dict(layers.full_state_dict())
        mixed = MixPrecisionLayer(layers, dtype="bfloat16")
        model = fleet.distributed_model(mixed if wrap == "kept" else layers)
        optimizer, theirs = make(layers.parameters()), make(single.parameters())
        optimizer = fleet.distributed_optimizer(optimizer)
        mixed_single = MixPrecisionLayer(single, dtype="bfloat16")
        for step in range(3):
            data = batch(seed=step)
            model.train_batch(data, optimizer)
            assert layers.parameters()[0].grad is None
            assert layers.parameters()[0].main_grad.dtype == paddle.float32
            single_step(mixed_single, theirs, data, nn.functional.cross_entropy)
            assert bits(layers.full_state_dict()) == bits(single.state_dict())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision_by_strategy_is_float32_on_cpu_and_that_is_told_once(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    log.once.cache_clear()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": ROWS}
    strategy.amp = True
    strategy.amp_configs = {"use_pure_bf16": level == "O2"}
    for _ in range(2):
        with begun(strategy):
            model = pipeline()
            assert model.train_batch(batch(), sgd(model)).dtype == paddle.float32
            assert {p.dtype for p in model.parameters()} == {paddle.float32}
    assert caplog.text.count("strategy.amp has no effect on CPU") == 1


def head(embedding: Any, value: Any) -> Any:
    return paddle.matmul(value, embedding.weight, transpose_y=True)


def layers() -> list[Any]:
    return [
        SharedLayerDesc("tied", nn.Embedding, None, "weight", 10, 8),
        LayerDesc(nn.Linear, 8, 8),
        SharedLayerDesc("tied", nn.Embedding, head, "weight", 10, 8),
    ]


def apart(degrees: dict[str, int], scale: str) -> float:
    """Trains two batches, one after another and without a step between; how far that is off."""
    with job(micro_batches=2, **degrees):
        fleet.fleet._user_defined_strategy.gradient_scale_configs = {"scale_strategy": scale}
        model = pipeline(layers())
        paddle.seed(fleet.worker_index() // degrees.get("pp", 1))
        batches = [[paddle.randint(0, 10, [4, 5]), paddle.randint(0, 10, [4, 5])] for _ in "ab"]
        parameters = model.parameters()

        def cleared() -> list[Any]:
            gradients = [p.grad.numpy() for p in parameters]
            for parameter in parameters:
                parameter.clear_gradient(False)
            return gradients

        wanted = [np.ones(p.shape, "float32") for p in parameters]
        for data in batches:
            model.forward_backward_pipeline(data)
            wanted = [total + one for total, one in zip(wanted, cleared())]
        for parameter in parameters:  # a loss of the script's own has left something
            parameter.grad = paddle.ones_like(parameter)
        for data in batches:
            model.forward_backward_pipeline(data)
        return max(float(abs(one - total).max()) for one, total in zip(cleared(), wanted))


@pytest.mark.parametrize(
    ("degrees", "scale"),
    [({"pp": 2}, "avg"), ({"dp": 2}, "avg"), ({"dp": 2}, "sum"), ({"sharding": 2}, "sum")],
)
def test_batches_without_a_step_between_add_up(on_ranks: Any, degrees: Any, scale: str) -> None:
    assert max(on_ranks(apart, 2, degrees, scale)) < 1e-6
