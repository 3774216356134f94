"""A layer that draws from Python's or NumPy's generators is known by its code."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import weakref
from random import uniform
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.python_draws import draws_python


def helper() -> float:
    return uniform(0, 1)


class Calls(nn.Layer):
    """Draws in a method that its forward calls, by a function of its own."""

    def forward(self, x: Any) -> Any:
        return self.scaled(x)

    def scaled(self, x: Any) -> Any:
        return x * helper()


class Quiet(nn.Layer):
    """Draws its weight only, and by Paddle's generator, though that is called random too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.random.rand()

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, float(np.mean([self.scale])))


def imports_late(x: Any) -> Any:
    import random as late

    return x * late.random()


def within(x: Any) -> Any:
    return next(x * np.random.rand() for _ in range(2))


def closing(generator: Any) -> Any:
    return lambda x: x * generator()


@dataclasses.dataclass
class Weighted:
    """Compares by value, and so has no hash."""

    weight: float = 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.weight * helper()


CASES: list[tuple[Any, bool]] = [
    (Calls(), True),
    (nn.Sequential(nn.Linear(2, 2), nn.Sequential(Calls())), True),
    (imports_late, True),
    (within, True),
    (closing(random.random), True),
    (functools.partial(within), True),
    (Quiet(), False),
    (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), False),
    (paddle.rand, False),
    (closing(np.random.default_rng(0).random), False),
    (closing(helper), True),
    (Weighted(), True),
]


@pytest.mark.parametrize(("function", "draws"), CASES)
def test_what_names_a_generator_draws(function: Any, draws: bool) -> None:
    assert draws_python(function) is draws


def test_nothing_that_a_function_holds_outlives_it() -> None:
    held = paddle.ones([2])
    gone = weakref.ref(held)
    # As a forward makes a hook of each of its outputs.
    assert not draws_python(lambda grad, held=held: grad * held)
    del held
    gc.collect()
    assert gone() is None
