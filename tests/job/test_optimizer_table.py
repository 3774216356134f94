"""Which optimizers and clips pass where ranks hold parts of a model, and which do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.job.optimizer_table import require_clip, require_optimizer
from tests.fixtures import Patch
from tests.pipelines import job, pipeline

pytestmark = pytest.mark.every_row

optimizers = paddle.optimizer
LookAhead = paddle.incubate.LookAhead


def parameters() -> list[Any]:
    return [paddle.create_parameter([2, 2], "float32")]


class Logged(optimizers.AdamW):  # type: ignore[misc]
    """Changes nothing of a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = 0

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self.seen += 1
        super().clear_grad(set_to_zero)


class Timed(Logged):
    """Notes something around Paddle's step."""

    def step(self) -> None:
        begin = time.perf_counter()
        super().step()
        self.seconds = round(time.perf_counter() - begin, 3)


class Printed(Logged):
    def step(self) -> None:
        self.seen += 1
        super(Printed, self).step()  # noqa: UP008 (as older scripts have it)
        if self.seen % 2:
            print(self.get_lr(), self.seen)


class InHaste(Logged):
    def step(self) -> None:
        if time.perf_counter() < self.seen:
            super().step()


class Clipping(optimizers.SGD):  # type: ignore[misc]
    def step(self) -> None:
        for parameter in self._parameter_list:
            parameter.grad.clip_(-0.1, 0.1)
        super().step()


class Hurried(Logged):
    """Sets what Paddle's step reads."""

    def step(self) -> None:
        self._learning_rate = 0.1 * self.seen
        super().step()


class LocalTensor(Logged):
    """Changes what it holds."""

    def step(self) -> None:
        for one in self.tensors:
            one *= 2
        super().step()


class ClippingBelow(Clipping):
    def step(self) -> None:
        super().step()


def held() -> Any:
    made = of(LocalTensor)
    made.tensors = parameters()
    return made


class Weighed(Logged):
    """Sets what it also reads."""

    def step(self) -> None:
        super().step()
        self.before = self.before


class Skipping(Logged):
    def step(self) -> None:
        self.seen += 1


class Scaled(optimizers.SGD):  # type: ignore[misc]
    def step(self, by: float = 1.0) -> None:
        super().step()


class Lion(optimizers.Optimizer):  # type: ignore[misc]
    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        parameter, gradient = param_and_grad
        parameter.set_value(parameter - 0.1 * gradient.sign())


class Around:
    """A wrapper of a script's own, which hands all names on."""

    def __init__(self, base: Any) -> None:
        self._inner_opt = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner_opt, name)


class Delegating:
    """The same, under another name of what it wraps."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


def patched() -> Any:
    made = optimizers.SGD(0.1, parameters=parameters())
    made.step = lambda: None
    return made


def lars() -> Any:
    return paddle.incubate.optimizer.LarsMomentumOptimizer(0.1, 0.9, parameter_list=parameters())


def of(kind: Any, *arguments: Any) -> Any:
    return kind(*arguments, parameters=parameters())


class Warmed(nn.ClipGradByGlobalNorm):
    """Its norm changes by a rule of the script's, its methods are Paddle's."""

    def warm(self) -> None:
        self.clip_norm = min(self.clip_norm * 2, 1.0)


class AutoClip(nn.ClipGradByGlobalNorm):
    def _dygraph_clip(self, pairs: Any) -> Any:
        return super()._dygraph_clip(pairs)


#: Whether each is right on two stages, and with shards along mp.
OPTIMIZERS: dict[str, tuple[Any, bool, bool]] = {
    "AdamW": (lambda: of(optimizers.AdamW), True, True),
    "Lamb": (lambda: of(optimizers.Lamb), True, False),
    "Lars": (lars, True, False),
    "a subclass that steps as Paddle's": (lambda: of(Logged), True, True),
    "a step that notes its time": (lambda: of(Timed), True, True),
    "a step that prints": (lambda: of(Printed), True, True),
    "a step of its own": (lambda: of(Clipping), False, False),
    "another rate": (lambda: of(Hurried), False, False),
    "weights that it holds": (held, False, False),
    "what it has not begun with": (lambda: of(Weighed), False, False),
    "a step by a clock": (lambda: of(InHaste), False, False),
    "a step of its own below one that notes": (lambda: of(ClippingBelow), False, False),
    "no step of Paddle's": (lambda: of(Skipping), False, False),
    "a step with an argument": (lambda: of(Scaled), False, False),
    "an update of its own": (lambda: of(Lion, 0.1), False, False),
    "a step that was set": (patched, False, False),
    "LookAhead": (lambda: LookAhead(of(optimizers.SGD)), False, False),
    "a wrapper": (lambda: Around(of(optimizers.SGD)), False, False),
    "a wrapper under another name": (lambda: Delegating(of(optimizers.SGD)), False, False),
}
CLIPS: dict[str, tuple[Any, bool, bool]] = {
    "none": (lambda: None, True, True),
    "a value": (lambda: nn.ClipGradByValue(0.1), True, True),
    "a norm": (lambda: nn.ClipGradByNorm(0.1), True, True),
    "a global norm": (lambda: nn.ClipGradByGlobalNorm(0.1), True, True),
    "another number": (lambda: Warmed(0.1), True, True),
    "another rule": (lambda: AutoClip(0.1), False, False),
    "a function": (lambda: lambda pairs: pairs, False, False),
}


@pytest.fixture(params=["pp", "mp"])
def parted(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[str]:
    """A job that takes itself for one of two ranks along an axis, and its axis."""
    axis = request.param
    with job(allow=["optimizer:Lion", "clip:AutoClip"] if axis == "pp" else []) as running:
        monkeypatch.setattr(running, "local", False)
        monkeypatch.setattr(running, "degrees", replace(running.degrees, **{axis: 2}))
        yield axis


def assert_refused(require: Any, value: Any, border: str, right: bool) -> None:
    running: Any = current_job()
    entry = f"{border}:{type(value).__name__}"
    if right or entry in running.allow.entries:
        require(value, running)
        assert right or entry in running.allow.used
        return
    with pytest.raises(ConfigError, match=rf"(?s)not known .*'allow': \['{border}:"):
        require(value, running)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_known_to_be_right_or_allowed(name: str, parted: str) -> None:
    make, *right = OPTIMIZERS[name]
    assert_refused(require_optimizer, make(), "optimizer", right[parted == "mp"])


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_is_known_to_be_right_or_allowed(name: str, parted: str) -> None:
    make, *right = CLIPS[name]
    assert_refused(require_clip, make(), "clip", right[parted == "mp"])


def test_a_process_with_the_whole_model_takes_all_but_saves_no_wrapper(tmp_path: Path) -> None:
    with job(2) as running:
        for make, *_ in OPTIMIZERS.values():
            require_optimizer(make(), running)
        for make, *_ in CLIPS.values():
            require_clip(make(), running)
        with pytest.raises(ConfigError, match="Paddle's"):
            require_optimizer(object.__new__(type("Duck", (), {})), running)
        model = pipeline()
        around = LookAhead(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
        wrapped = fleetpipe.fleet.distributed_optimizer(around)
        manager = fleetpipe.CheckpointManager(tmp_path)
        with pytest.raises(ConfigError, match=r"(?s)state of what LookAhead wraps.*around SGD"):
            manager.save(1, model=model, optimizer=wrapped)
        lion = Lion(0.1, parameters=model.parameters())
        wrapped = fleetpipe.fleet.distributed_optimizer(lion)
        lion.counted, lion.momentum = {"steps": 3, "weights": [*model.parameters()]}, {}
        manager.save(1, model=model, optimizer=wrapped)
        lion.momentum["w"] = paddle.ones([2])
        with pytest.raises(ConfigError, match=r"(?s)no checkpoint has the tensors.*Lion.momentum"):
            manager.save(2, model=model, optimizer=wrapped)
