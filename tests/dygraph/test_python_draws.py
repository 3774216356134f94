"""A layer that draws from Python's or NumPy's generators is known by its code."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import sys
import weakref
from random import uniform
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.vision.transforms import Normalize, RandomErasing

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


class Noise:
    """Draws in a method, a property and a class method, and is not called itself."""

    def scaled(self, x: Any) -> Any:
        return x * helper()

    @property
    def factor(self) -> float:
        return helper()

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x * helper()


class Slotted:
    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


class Has(nn.Layer):
    """Has something in an attribute, by which its forward may draw."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Any) -> Any:
        return x


class DrawsInProperty(nn.Layer):
    @property
    def factor(self) -> float:
        return helper()

    def forward(self, x: Any) -> Any:
        return x * self.factor


class Hooked(nn.Linear):
    def __init__(self, when: str) -> None:
        super().__init__(2, 2)
        getattr(self, f"register_forward_{when}_hook")(lambda *values: values[-1] * helper())


TABLE = {"scale": [helper]}
THIS_MODULE = sys.modules[__name__]

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
    (lambda x: THIS_MODULE.helper() * x, True),
    (lambda x: THIS_MODULE.paddle.rand([2]) * x, False),
    (lambda x: TABLE["scale"][0]() * x, True),
    (lambda x: 2 * Noise.of_class(x), True),
    (closing(closing(helper)), True),
    (Noise().scaled, True),
    (Has(Noise()), True),
    (Has([helper]), True),
    (Has({"rate": (0.1, {"by": random.gauss})}), True),
    (Has(np.random), True),
    (Has(Slotted(helper)), True),
    (Has(functools.partial(max, key=helper)), True),
    (Has(RandomErasing()), True),
    (Has(Normalize()), False),
    (Has([0.5, "relu", paddle.ones([2]), nn.functional.relu, np.random.default_rng(0)]), False),
    (DrawsInProperty(), True),
    (Hooked("pre"), True),
    (nn.Sequential(Hooked("post")), True),
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
