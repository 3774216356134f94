"""Experts in one process: tokens that go nowhere, and what is no routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.experts import Experts
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.mesh import SoleGroup
from fleetpipe.paddle_api.kernels import CAN_GATHER_NOTHING


class ExchangeCounter(SoleGroup):
    """This process alone, and how often it exchanged."""

    exchanges = 0

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        self.exchanges += 1
        return super().all_to_all(parts)


@pytest.mark.parametrize("tokens", [6, 0], ids=["all_dropped", "no_token"])
def test_backward_comes_by_the_exchanges_without_a_token(tokens: int) -> None:
    """Another rank that sent tokens here waits for their gradients."""
    if not tokens and not CAN_GATHER_NOTHING:
        pytest.skip("2.6.2 has no sum of no numbers")
    mixture = Experts(lambda: nn.Linear(4, 4), 2)
    group = mixture._group = ExchangeCounter()
    choices = paddle.full([tokens, 2], -1, "int64")
    output = mixture(paddle.ones([tokens, 4]), choices, paddle.ones([tokens, 2]))
    assert list(output.shape) == [tokens, 4]
    assert float(output.abs().sum()) == 0
    forward = group.exchanges
    output.sum().backward()
    if CAN_GATHER_NOTHING:
        assert group.exchanges == forward + 2


@pytest.mark.parametrize(
    ("tokens", "choices", "weights"),
    [
        ([6, 4], [6], [6]),
        ([6, 4], [6, 2], [6, 1]),
        ([6, 4], [3, 2], [3, 2]),
        ([2, 3, 4], [6, 2], [6, 2]),
    ],
)
def test_a_routing_of_other_shapes_is_refused(
    tokens: list[int], choices: list[int], weights: list[int]
) -> None:
    mixture = Experts(lambda: nn.Linear(4, 4), 2)
    with pytest.raises(UsageError, match="as many choices of experts as weights") as caught:
        mixture(paddle.ones(tokens), paddle.zeros(choices, "int64"), paddle.ones(weights))
    assert f"choices {choices}, weights {weights}" in str(caught.value)


@pytest.mark.parametrize("arguments", [(nn.Linear(4, 4), "8"), ([nn.Linear(4, 4)], 1)])
def test_odd_arguments_of_experts_are_named(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="what builds an expert, and how many"):
        Experts(*arguments)


@pytest.mark.parametrize("expert", [None, nn.Linear(4, 4)], ids=["none", "the_same"])
def test_experts_that_are_no_new_layers_are_refused(expert: Any) -> None:
    with pytest.raises(ConfigError, match="a layer of its own"):
        Experts(lambda: expert, 2)


def test_choices_in_the_place_of_weights_are_refused() -> None:
    mixture = Experts(lambda: nn.Linear(4, 4), 2)
    choices = paddle.zeros([3, 1], "int64")
    with pytest.raises(UsageError, match="pass the values of"):
        mixture(paddle.ones([3, 4]), choices, choices)
    with pytest.raises(UsageError, match="routed by whole numbers"):
        mixture(paddle.ones([3, 4]), paddle.ones([3, 1]), paddle.ones([3, 1]))
