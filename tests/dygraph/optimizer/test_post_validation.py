"""Steps that do not wait for the norm of all ranks: the bits of those that do, put back or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.optimizer import clip_global
from fleetpipe.dygraph.optimizer.clip_global import GlobalNormClip, replace_clips
from fleetpipe.dygraph.optimizer.post_validation import PostValidation
from fleetpipe.mesh import Degrees, SoleGroup
from tests.fixtures import Call, Patch

optimizers = paddle.optimizer
#: Of the other stage's gradients, by step: the own ones are below the limit, both are not.
SCALES = (0.01, 0.01, 5.0, 5.0, 0.01, 0.01, 5.0, 0.01, 0.01, 5.0)
LIMIT = 4.0
SHAPES = [(3, 5), (7,), (2, 2)]


class Late:
    """A gathering of two stages; that of the other one never is there before it is waited for."""

    def __init__(self, own: Any, other: Any, early: bool) -> None:
        self._values, self._early = [own, other], early

    def arrived(self) -> bool:
        return self._early

    def values(self) -> list[Any]:
        return self._values


class OtherStage:
    """Stands for the job of two stages of which this process is the first."""

    def __init__(self, monkeypatch: Patch, early: bool = False) -> None:
        self.parameters: list[Any] = []
        self.early = early
        self.calls = 0
        job = SimpleNamespace(
            local=False, degrees=Degrees(pp=2), group=lambda: self, model_parallel=SoleGroup
        )
        monkeypatch.setattr(clip_global, "current_job", lambda: job)

    def begin_all_gather(self, own: Any) -> Late:
        self.calls += 1
        clip = GlobalNormClip(nn.ClipGradByGlobalNorm(LIMIT))
        clip.orders = {id(p): 100 + number for number, p in enumerate(self.parameters)}
        squares = [*clip._own_squares([(p, p.grad) for p in self.parameters])]
        return Late(own, clip_global._packed(squares), self.early)


def made(seed: int) -> list[Any]:
    numbers = np.random.default_rng(seed)
    found = []
    for shape in SHAPES:
        parameter = nn.Layer().create_parameter(list(shape))
        parameter.set_value(numbers.standard_normal(shape).astype("float32"))
        found.append(parameter)
    return found


def give(parameters: list[Any], seed: int, scale: float) -> None:
    numbers = np.random.default_rng(seed)
    for parameter in parameters:
        grad = numbers.standard_normal(parameter.shape).astype("float32") * np.float32(scale)
        parameter.grad = paddle.to_tensor(grad)


def bits(parameters: list[Any], optimizer: Any) -> list[bytes]:
    """Of parameters and of what the optimizer keeps for them."""
    kept = [
        by_name[parameter.name]
        for _, by_name in sorted(optimizer._accumulators.items())
        for parameter in parameters
        if parameter.name in by_name
    ]
    return [tensor.numpy().tobytes() for tensor in (*parameters, *kept)]


def train(make: Call, stage: OtherStage, *, scheduler: bool = False) -> PostValidation:
    """Trains two stages as one with Paddle's own clip, and the first one beside it."""
    own, twins, stage.parameters, their = made(1), made(1), made(2), made(2)
    rates: list[Any] = [0.05, 0.05]
    if scheduler:
        rates = [optimizers.lr.StepDecay(0.05, step_size=2, gamma=0.5) for _ in range(2)]
    ours, whole = (
        make(rate, parameters=of, grad_clip=nn.ClipGradByGlobalNorm(LIMIT))
        for rate, of in zip(rates, (own, [*twins, *their]))
    )
    clips = replace_clips(ours)
    clips[0].orders = {id(p): number for number, p in enumerate(own)}
    later = PostValidation(ours, clips)
    for step, scale in enumerate(SCALES):
        for parameters in (own, twins):
            give(parameters, step, 0.1)
        for parameters in (stage.parameters, their):
            give(parameters, 50 + step, scale)
        clips[0].begin()
        later.step(ours.step)
        whole.step()
        for rate in rates if scheduler else ():
            rate.step()
        assert bits(own, ours) == bits(twins, whole), step
    return later


def named(kind: str, **options: Any) -> Call:
    return lambda rate, **others: getattr(optimizers, kind)(rate, **options, **others)


OPTIMIZERS: dict[str, Call] = {
    "SGD": named("SGD", weight_decay=0.01),
    "Momentum": named("Momentum", momentum=0.9, use_nesterov=True),
    "Adam": named("Adam"),
    "AdamW": named("AdamW", weight_decay=0.1),
    "Adamax": named("Adamax"),
    "Adagrad": named("Adagrad"),
    "Adadelta": named("Adadelta"),
    "RMSProp": named("RMSProp", centered=True),
    "Lamb": named("Lamb"),
    "NAdam": named("NAdam"),
    "RAdam": named("RAdam"),
    "Rprop": named("Rprop", learning_rate_range=(1e-5, 50)),
    "ASGD": named("ASGD", batch_num=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_was_clipped_is_put_back_with_all_its_state(
    kind: str, monkeypatch: Patch
) -> None:
    if not hasattr(optimizers, kind):
        pytest.skip("a later Paddle has it")
    later = train(OPTIMIZERS[kind], OtherStage(monkeypatch))
    # Not the first, nor those after one that was clipped.
    assert (later.ahead, later.taken_back) == (6, 3)


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "AdamW"])
def test_the_rate_of_a_scheduler_is_that_of_the_step(kind: str, monkeypatch: Patch) -> None:
    later = train(OPTIMIZERS[kind], OtherStage(monkeypatch), scheduler=True)
    assert later.taken_back == 3


def test_master_weights_are_put_back_too(monkeypatch: Patch) -> None:
    """No kernel on CPU has any: what stands for one is doubled by each step."""
    stage, own = OtherStage(monkeypatch), made(1)
    stage.parameters = made(2)
    optimizer = optimizers.SGD(0.1, parameters=own, grad_clip=nn.ClipGradByGlobalNorm(LIMIT))
    master = optimizer._master_weights[own[0].name] = paddle.ones([2])
    clips = replace_clips(optimizer)
    later = PostValidation(optimizer, clips)

    def step() -> None:
        optimizer.step()
        master.scale_(2.0)

    for number, scale in enumerate((0.01, 0.01, 5.0)):
        give(own, number, 0.1)
        give(stage.parameters, number, scale)
        clips[0].begin()
        later.step(step)
    assert later.taken_back == 1
    assert master.tolist() == [8.0, 8.0]


def test_what_has_arrived_is_not_gone_ahead_of(monkeypatch: Patch) -> None:
    later = train(OPTIMIZERS["AdamW"], OtherStage(monkeypatch, early=True))
    assert (later.ahead, later.taken_back) == (0, 0)


def test_groups_with_norms_of_their_own_are_put_back_together(monkeypatch: Patch) -> None:
    """The other stage's gradients are in both groups there, and so twice in the norm here."""
    stage = OtherStage(monkeypatch)
    own = made(1)
    stage.parameters = made(2)
    groups = [{"params": own[:1]}, {"params": own[1:], "learning_rate": 0.5}]
    clip = nn.ClipGradByGlobalNorm(LIMIT)
    results = []
    for early in (False, True):
        stage.early = early
        own[0].set_value(made(1)[0])
        own[1].set_value(made(1)[1])
        own[2].set_value(made(1)[2])
        optimizer = optimizers.Adam(
            0.05, parameters=[{**group} for group in groups], grad_clip=clip
        )
        clips = replace_clips(optimizer)
        later = PostValidation(optimizer, clips)
        norms = []
        for step, scale in enumerate(SCALES):
            give(own, step, 0.1)
            give(stage.parameters, 50 + step, scale)
            for one in clips:
                one.begin()
            later.step(optimizer.step)
            norms.append([float(norm) for one in clips for norm in one.norms])
            optimizer.clear_grad()
        results.append(([p.numpy().tobytes() for p in own], norms))
        assert (later.ahead, later.taken_back) == ((0, 0) if early else (6, 3))
    assert results[0] == results[1]
    assert stage.calls == 2 * 2 * len(SCALES)


def test_a_first_group_that_another_clip_steps_is_waited_for(monkeypatch: Patch) -> None:
    OtherStage(monkeypatch)
    own = made(1)
    groups = [
        {"params": own[:1], "grad_clip": nn.ClipGradByValue(1.0)},
        {"params": own[1:], "grad_clip": nn.ClipGradByGlobalNorm(LIMIT)},
    ]
    optimizer = optimizers.Adam(0.05, parameters=groups)
    later = PostValidation(optimizer, replace_clips(optimizer))
    for step in range(3):
        give(own, step, 0.1)
        for clip in later._clips:
            clip.begin()
        later.step(optimizer.step)
    assert later.ahead == 0


def test_an_optimizer_of_the_users_own_waits(monkeypatch: Patch) -> None:
    class Counting(optimizers.SGD):  # type: ignore[misc]
        """Its state is where nobody else can know."""

        steps = 0

        def step(self) -> None:
            super().step()
            self.steps += 1

    later = train(Counting, OtherStage(monkeypatch))
    assert later.ahead == 0


def test_gradients_too_small_for_a_product_are_stepped_with_alike(monkeypatch: Patch) -> None:
    """A factor of 1 leaves denormal numbers as they are."""
    stage = OtherStage(monkeypatch)
    found = []
    for early in (False, True):
        stage.early = early
        own = made(1)
        optimizer = optimizers.SGD(1.0, parameters=own, grad_clip=nn.ClipGradByGlobalNorm(LIMIT))
        clips = replace_clips(optimizer)
        later = PostValidation(optimizer, clips)
        for parameter in own:
            parameter.set_value(paddle.zeros_like(parameter))
        for _ in range(3):
            give(own, 0, 1e-39)
            clips[0].begin()
            later.step(optimizer.step)
        assert later.ahead == (0 if early else 2)
        found.append([p.numpy().tobytes() for p in own])
    assert found[0] == found[1]
