"""Optimizers of two ranks, one of which has less to train, beside Paddle's own on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, FleetPipeError
from tests.jobs import ROWS
from tests.launching import JobFailed
from tests.pipelines import batch, job, mlp_layers, pipeline

Clip = nn.ClipGradByGlobalNorm
Named = Mapping[str, Any]
optimizers = paddle.optimizer


def part(named: Named, *prefixes: str) -> list[Any]:
    """The parameters of some layers, which may all be those of another rank."""
    return [parameter for name, parameter in named.items() if name.startswith(prefixes)]


def frozen(named: Named, *prefixes: str) -> list[Any]:
    """Freezes some layers, and returns what is left to train."""
    for parameter in part(named, *prefixes):
        parameter.stop_gradient = True
    return [parameter for parameter in named.values() if not parameter.stop_gradient]


def groups(named: Named, empty: bool, *options: dict[str, Any]) -> list[Any]:
    """Two groups, one of each stage; with ``empty`` also that of the other rank."""
    both = [{"params": part(named, "0", "2"), **options[0]}]
    both += [{"params": part(named, "4", "6"), **options[1]}]
    return [group for group in both if group["params"] or empty]


class EachByItself(nn.ClipGradByGlobalNorm):
    """A script's own clip that looks at one gradient at a time."""

    def _dygraph_clip(self, params_grads: list[Any]) -> list[Any]:
        return [(p, g / (1 + g.abs().max())) for p, g in params_grads]


class Halved(nn.ClipGradByGlobalNorm):
    """A script's own clip by the norm of all gradients."""

    def _dygraph_clip(self, params_grads: list[Any]) -> list[Any]:
        return [(p, g / 2) for p, g in super()._dygraph_clip(params_grads)]


Make = Callable[[Named], Any]
HALF, TENTH = {"learning_rate": 0.5}, {"learning_rate": 0.1}
MAKE: dict[str, Make] = {
    "all": lambda n: optimizers.SGD(0.2, parameters=[*n.values()], grad_clip=Clip(0.3)),
    "a clip of the script's": lambda n: optimizers.SGD(
        0.2, parameters=[*n.values()], grad_clip=EachByItself(0.1)
    ),
    "no clip": lambda n: optimizers.Lamb(0.1, parameters=[*n.values()]),
    "first frozen": lambda n: optimizers.AdamW(
        0.05, parameters=frozen(n, "0", "2"), grad_clip=Clip(0.05)
    ),
    "last frozen": lambda n: optimizers.Lamb(0.05, parameters=frozen(n, "4", "6")),
    "head alone": lambda n: optimizers.Momentum(
        0.1, parameters=part(n, "6"), weight_decay=0.1, grad_clip=Clip(0.05)
    ),
    "a generator": lambda n: optimizers.Adagrad(0.1, parameters=iter(part(n, "6"))),
    "left out": lambda n: optimizers.SGD(
        0.5, parameters=groups(n, False, HALF, TENTH), grad_clip=Clip(0.1)
    ),
    "left out, several at once": lambda n: optimizers.Momentum(
        0.5, parameters=groups(n, False, HALF, TENTH), use_multi_tensor=True
    ),
    "own clips": lambda n: optimizers.Adam(
        0.05, parameters=groups(n, False, {"grad_clip": Clip(0.01)}, {"grad_clip": Clip(0.1)})
    ),
    "empty": lambda n: optimizers.Momentum(
        0.5, parameters=groups(n, True, {}, {}), weight_decay=0.1, grad_clip=Clip(0.1)
    ),
    "a group of one rank": lambda n: optimizers.AdamW(
        0.05,
        parameters=[
            {"params": parameters, "learning_rate": 0.5, "grad_clip": clip}
            for parameters, clip in ((part(n, "4", "6"), nn.ClipGradByNorm(0.1)),)
            if parameters
        ],
    ),
    "weights": lambda n: optimizers.SGD(0.2, parameters=[{"params": part(n, "0.w", "4.w")}]),
}


def replaced(optimizer: Any, _: Named) -> None:
    optimizer._grad_clip = Clip(0.02)


def grouped(optimizer: Any, named: Named) -> None:
    biases = {"params": part(named, "0.b", "2", "4.b"), "grad_clip": Clip(0.02)}
    optimizer._add_param_group(biases)


def narrowed(optimizer: Any, _: Named) -> None:
    optimizer.narrowed.clip_norm = 0.02


def with_own_clip(named: Named) -> Any:
    clip = Clip(0.3)
    made = optimizers.SGD(0.2, parameters=[*named.values()], grad_clip=clip)
    made.narrowed = clip
    return made


MAKE["its clip"] = with_own_clip
#: What is made, what is done to it before the second step, and how it is stepped.
SITUATIONS: list[tuple[str, Callable[[Any, Named], None] | None, str]] = [
    *((name, None, "train_batch") for name in MAKE),
    *((name, None, "step") for name in ("first frozen", "head alone", "left out", "own clips")),
    ("last frozen", None, "minimize"),
    ("first frozen", None, "scaler"),
    ("all", replaced, "train_batch"),
    ("all", replaced, "step"),
    ("no clip", replaced, "train_batch"),
    ("weights", grouped, "train_batch"),
    ("its clip", narrowed, "train_batch"),
]


def trained(situation: tuple[str, Any, str]) -> float:
    """Trains three batches in the job that runs; returns how far parameters are from plain ones."""
    made, later, stepped = situation
    paddle.seed(7)
    descriptions = mlp_layers()
    model = pipeline(descriptions)
    plain_layers = {
        str(n): one.build_layer() for n, one in enumerate(descriptions) if not callable(one)
    }
    plain = {f"{i}.{n}": p for i, one in plain_layers.items() for n, p in one.named_parameters()}
    named = dict(model.layers.named_parameters())
    for name, parameter in plain.items():
        parameter.set_value(paddle.randn(parameter.shape) * 0.4)
        if name in named:
            named[name].set_value(parameter)

    def forward(value: Any) -> Any:
        for number in range(7):
            layer = plain_layers.get(str(number))
            value = nn.functional.tanh(value) if layer is None else layer(value)
        return value

    single, optimizer = MAKE[made](plain), fleet.distributed_optimizer(MAKE[made](named))
    scaler = fleet.distributed_scaler(paddle.amp.GradScaler())
    for step in range(3):
        if step == 1 and later is not None:
            later(single, plain)
            later(optimizer, named)
        data = batch(seed=step)
        for begin in range(0, 4 * ROWS, ROWS):
            inputs, labels = (tensor[begin : begin + ROWS] for tensor in data)
            (nn.functional.cross_entropy(forward(inputs), labels) * 0.25).backward()
        single.step()
        single.clear_grad()
        if stepped in ("train_batch", "scaler"):
            model.train_batch(data, optimizer, scaler=scaler if stepped == "scaler" else None)
            continue
        loss = model.forward_backward_pipeline(data)
        optimizer.step() if stepped == "step" else optimizer.minimize(loss)
        optimizer.clear_grad()
    return max(float((named[name] - plain[name]).abs().max()) for name in named)


def refusals(model: Any) -> list[str]:
    """What an optimizer over nothing of any rank, none at all, and a clip by a norm are told."""
    told = []
    for wrong in ([], None, model.parameters()):
        try:
            clip = Halved(0.1) if wrong else None
            optimizer = None if wrong is None else optimizers.SGD(0.1, wrong, grad_clip=clip)
            model.train_batch(batch(), fleet.distributed_optimizer(optimizer))
        except FleetPipeError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def on_one_of_two_ranks() -> tuple[list[float], list[str]]:
    """What a rank does."""
    with job(2, allow=["clip:EachByItself"]):
        apart = [trained(situation) for situation in SITUATIONS]
        return apart, refusals(pipeline())


def test_ranks_with_less_to_train_step_as_one_device(on_ranks: Any) -> None:
    for apart, told in on_ranks(on_one_of_two_ranks, 2):
        assert dict(zip(map(str, SITUATIONS), apart)) == dict.fromkeys(map(str, SITUATIONS), 0.0)
        wrong, none, own_clip = told
        assert "'allow': ['clip:Halved']" in own_clip
        assert "ConfigError: the optimizer was built on the wrong parameters" in wrong
        assert "parameters=[]" in none


#: Optimizers with an option that differs on ranks, by rank and parameters.
OPTIONS: dict[str, Callable[[int, Any], Any]] = {
    "beta1": lambda rank, own: optimizers.Adam(0.1, beta1=0.9 - rank / 10, parameters=own),
    "momentum": lambda rank, own: optimizers.Momentum(0.1, 0.9 - rank / 10, parameters=own),
    "weight_decay": lambda rank, own: optimizers.AdamW(
        0.1, weight_decay=rank / 10, parameters=[{"params": own}]
    ),
    "regularization": lambda rank, own: optimizers.SGD(0.1, own, weight_decay=0.1 + rank / 10),
}


def train_with_own_option(option: str) -> None:
    with job(2):
        model = pipeline()
        optimizer = OPTIONS[option](fleet.worker_index(), model.parameters())
        model.train_batch(batch(), fleet.distributed_optimizer(optimizer))


@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_whose_optimizers_have_other_options_are_refused(on_ranks: Any, option: str) -> None:
    with pytest.raises(JobFailed) as failed:
        on_ranks(train_with_own_option, 2, option)
    assert f"as on rank 0: {option} of the optimizer = " in str(failed.value)


def test_one_process_has_paddles_constructors_and_clips_of_a_script() -> None:
    with job(2):
        optimizer = optimizers.SGD(0.1, pipeline().parameters(), grad_clip=Halved(0.1))
        fleet.distributed_optimizer(optimizer)
        assert type(optimizer._grad_clip) is Halved
    with pytest.raises(IndexError):
        optimizers.Momentum(0.1, parameters=[])
    with job(2), pytest.raises(ConfigError, match="wrong parameters"):
        pipeline().train_batch(
            batch(), fleet.distributed_optimizer(optimizers.SGD(0.1, parameters=[]))
        )
