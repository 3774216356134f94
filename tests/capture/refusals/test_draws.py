"""What a layer draws from generators of Python's and NumPy's is drawn anew in each call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError
from tests.jobs import job

X = paddle.ones([8, 3])
#: What was drawn.
DRAWN: list[float] = []


class Draws(nn.Layer):  # type: ignore[misc]
    """Draws from each generator, beside a layer; keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.__dict__["own"] = nn.Linear(3, 3), np.random.default_rng(0)

    def forward(self, x: Any) -> Any:
        numbers = [random.random(), float(np.random.rand()), self.own.random()]
        DRAWN.extend(numbers)
        return self.inner(x) if sum(numbers) < 1.5 else x


class Around(nn.Layer):  # type: ignore[misc]
    """That, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), Draws(), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


def test_a_sublayer_draws_in_each_call_and_is_a_node_as_a_whole() -> None:
    found = fleetpipe.explain(Around(), X[:2])
    assert [node.name for node in found.trace.nodes] == ["first", "middle", "last"]
    assert "draws from a generator of Python's or NumPy's" in found.unopened["middle"]
    with job(2):
        pipe = fleetpipe.pipeline(Around(), X[:2], split_spec=["last"], verify=False)
        model = fleet.distributed_model(pipe)
        DRAWN.clear()
        model.predict_batch(X)
    # Three numbers for each of four micro-batches, all different.
    assert len(set(DRAWN)) == len(DRAWN) == 12


class Evaluates(nn.Layer):  # type: ignore[misc]
    """Draws in evaluation alone, by a function of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if not self.training:
            order = list(range(3))
            shuffled(order)
            x = x.index_select(paddle.to_tensor(order), 1)
        return self.last(x)


shuffled = random.shuffle
LINE = Evaluates.forward.__code__.co_firstlineno + 4


def test_the_line_that_draws_is_named_whatever_it_calls_and_in_either_mode() -> None:
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(Evaluates(), X[:2], split_spec=["last"], verify=False)
    assert "draws from a generator of Python's or NumPy's" in str(caught.value)
    assert f"where: {__file__}:{LINE}\n" in str(caught.value)


def test_what_a_number_drawn_in_a_sublayer_decides_is_refused() -> None:
    class Coin(nn.Layer):  # type: ignore[misc]
        def forward(self) -> Any:
            return random.random() < 0.5

    class Tosses(Evaluates):
        def __init__(self) -> None:
            super().__init__()
            self.coin = Coin()

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x)) if self.coin() else self.last(x)

    with pytest.raises(CaptureError, match="a number of Python's that coin makes"):
        fleetpipe.pipeline(Tosses(), X[:2], split_spec=["last"])
