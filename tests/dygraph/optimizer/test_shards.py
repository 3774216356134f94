"""Stage 1: state for the own share alone, the parameters of an optimizer that has all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe.dygraph.optimizer.shards import Shards, owners
from fleetpipe.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from tests.groups import members, on_all

SHAPES = [[4, 6], [6], [6, 3], [3], [3, 3]]


class Layers(paddle.nn.Layer):
    """Parameters of several sizes with the same values whenever it is made."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        numbers = np.random.default_rng(0)
        for index, shape in enumerate(shapes):
            parameter = self.create_parameter(shape)
            parameter.set_value(numbers.standard_normal(shape).astype("float32"))
            self.add_parameter(str(index), parameter)

    def give_gradients(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        for parameter in self.parameters():
            gradient = paddle.to_tensor(numbers.standard_normal(parameter.shape).astype("float32"))
            if hasattr(parameter, "main_grad"):
                parameter.main_grad = gradient
            else:
                parameter.grad = gradient


def adamw(parameters: list[Any]) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=parameters)


def momentum(parameters: list[Any]) -> Any:
    return paddle.optimizer.Momentum(0.1, parameters=parameters, weight_decay=0.1)


def groups(parameters: list[Any]) -> Any:
    return paddle.optimizer.Adam(
        0.1,
        parameters=[
            {"params": parameters[:2], "weight_decay": 0.1},
            {"params": parameters[2:], "learning_rate": 0.5},
        ],
    )


def mixed(parameters: list[Any]) -> Any:
    return MixPrecisionOptimizer(adamw(parameters))


@pytest.mark.parametrize(
    ("make", "shapes"),
    [(adamw, SHAPES), (momentum, SHAPES), (groups, SHAPES), (mixed, SHAPES), (adamw, [[4, 6]])],
)
def test_members_step_their_shares_and_get_the_rest(make: Any, shapes: list[list[int]]) -> None:
    def layers() -> Layers:
        made = Layers(shapes)
        if make is mixed:
            MixPrecisionLayer(made, dtype="bfloat16")
        return made

    whole = layers()
    optimizer = make(whole.parameters())
    for seed in range(3):
        whole.give_gradients(seed)
        optimizer.step()
    expected = [parameter.numpy().tobytes() for parameter in whole.parameters()]
    state = optimizer.state_dict()
    group = members(2)
    nothing: list[int] = []

    def run(rank: int) -> tuple[list[bytes], int, int]:
        own = layers()
        theirs = make(own.parameters())
        shards = Shards(theirs, group[rank])
        for seed in range(3):
            own.give_gradients(seed)
            shards.step(theirs.step, lambda: nothing.append(rank))
            theirs.clear_grad()
            assert not any(
                float(getattr(p, "main_grad", p.grad).abs().max()) for p in own.parameters()
            )
        held = [value for value in theirs.state_dict().values() if hasattr(value, "size")]
        stepped = [parameter.numpy().tobytes() for parameter in own.parameters()]
        return stepped, sum(int(value.size) for value in held), len(held)

    found = on_all(2, run)
    for result in found:
        if isinstance(result, Exception):
            raise result
    assert [stepped for stepped, _, _ in found] == [expected] * 2
    everything = [value for value in state.values() if hasattr(value, "size")]
    assert sum(count for _, _, count in found) == len(everything)
    sizes = [size for _, size, _ in found]
    assert sum(sizes) == sum(int(value.size) for value in everything)
    if len(shapes) > 1:
        assert max(sizes) < 0.6 * sum(sizes)
        assert not nothing
    else:
        assert nothing == [1, 1, 1]


def test_owners_share_the_numbers_evenly_and_all_ranks_find_the_same() -> None:
    parameters = Layers(SHAPES).parameters()
    found = [owners(parameters, 2)[id(parameter)] for parameter in parameters]
    again = Layers(SHAPES).parameters()
    assert [owners(again, 2)[id(parameter)] for parameter in again] == found
    load = [0, 0]
    for parameter, owner in zip(parameters, found):
        load[owner] += int(parameter.size)
    assert load == [30, 30]


def test_parameters_without_a_gradient_are_not_sent() -> None:
    layers = Layers(SHAPES)
    layers.give_gradients(0)
    layers.parameters()[2].clear_gradient(False)
    optimizer = momentum(layers.parameters())

    sent: list[tuple[list[int], int]] = []

    class Group:
        rank, ranks = 1, 2

        def broadcast_each(self, tensors: list[tuple[Any, int]]) -> None:
            sent.extend((list(tensor.shape), source) for tensor, source in tensors)

    group: Any = Group()
    shards = Shards(optimizer, group)
    shards.step(optimizer.step, lambda: None)
    owner = {id(p): int(shards.owns(p)) for p in layers.parameters()}
    assert [list(p.shape) for p in layers.parameters() if owner[id(p)]] == [[6, 3], [3], [3, 3]]
    with_gradients = [p for p in layers.parameters() if p is not layers.parameters()[2]]
    assert sent == [(list(p.shape), owner[id(p)]) for p in with_gradients]


def test_a_trainer_is_told_by_name_who_keeps_the_state_of_a_parameter() -> None:
    layers = Layers(SHAPES)
    shards = Shards(adamw(layers.parameters()), members(2)[0])
    ranks = shards.ranks_by_name()
    assert set(ranks.values()) == {0, 1}
    for parameter in layers.parameters():
        assert shards.owns(parameter) == (ranks[parameter.name] == 0)


def test_a_rank_that_trains_nothing_steps_nothing() -> None:
    only = Layers([[1]]).parameters()[0]
    only.is_placeholder, only.stop_gradient = True, True  # what stands for an empty list
    for make in (adamw, momentum, mixed):
        optimizer = make([only])
        shards = Shards(optimizer, members(2)[0])
        assert shards.step(lambda: "stepped", lambda: "nothing") == "nothing"
        assert list(optimizer._parameter_list) == [only]
