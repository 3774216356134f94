"""Sums by a tree: one seed and one data give the same bits at every model-parallel degree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group

from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.backward.leaf import can_wait, inspect_call
from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    dropout,
    groups,
    parallel_matmul,
    replacements,
    sequence,
    split_axis,
)
from fleetpipe.errors import ConfigError
from tests.groups import MEMBERS, on_all, thread_members
from tests.pipelines import job

F = nn.functional


@pytest.fixture(autouse=True)
def trees() -> Iterator[None]:
    with job(1, sums="tree"):
        yield


def drawn(*shape: int, seed: int = 0) -> Any:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype("float32")
    return paddle.to_tensor(numbers, stop_gradient=False)


class Net(nn.Layer):
    """An embedding, two products around a GELU, a tied head, and the loss of it."""

    def __init__(self, whole: bool, **group: Any) -> None:
        super().__init__()
        self.group = group
        self.table = VocabParallelEmbedding(48, 32, **group)
        self.columns = ColumnParallelLinear(32, 64, has_bias=True, gather_output=whole, **group)
        self.rows = RowParallelLinear(64, 32, input_is_parallel=not whole, **group)
        self.loss = ParallelCrossEntropy(**group)

    def forward(self, ids: Any, labels: Any, noise: Any) -> tuple[Any, ...]:
        hidden = self.table(ids) + noise
        hidden = hidden + self.rows(F.gelu(self.columns(hidden)))
        own = parallel_matmul(hidden, self.table.weight, **self.group)
        logits = parallel_matmul(hidden, self.table.weight, gather_output=True, **self.group)
        return hidden, logits, self.loss(own, labels)


def on_members(
    degree: int, build: Callable[..., Any], run: Callable[[Any], dict[str, Any]]
) -> dict[str, bytes]:
    """The bits of what the members of a group make of their layers, shards put together."""
    seen, built = [Group(rank, 200 + rank, [*range(degree)]) for rank in range(degree)], []
    for group, thread in zip(seen, thread_members(degree)):
        groups.connect(group, thread)
        paddle.seed(3)
        built.append(build(**({} if degree == 1 else {"mp_group": group})))
    results = on_all(degree, lambda rank: run(built[rank]))
    for group, result in zip(seen, results):
        groups.disconnect(group)
        if isinstance(result, Exception):
            raise result
    return {name: put_together([result[name] for result in results]) for name in results[0]}


def put_together(values: list[Any]) -> bytes:
    """The bits of a tensor that is the same on all members, or of its shards beside each other."""
    axis = split_axis(values[0])
    arrays = [(value if axis is None else value.grad).numpy() for value in values]
    assert axis is not None or len({array.tobytes() for array in arrays}) == 1
    return arrays[0].tobytes() if axis is None else np.concatenate(arrays, axis).tobytes()


def trained(degree: int, whole: bool) -> dict[str, bytes]:
    """The bits of what a net of shards computes in a forward and a backward."""
    numbers = np.random.default_rng(1)
    ids, labels = (paddle.to_tensor(numbers.integers(0, 48, (2, 5))) for _ in range(2))
    labels[0, 1] = -100

    def run(net: Net) -> dict[str, Any]:
        noise = drawn(2, 5, 32)
        hidden, logits, loss = net(ids, labels, noise)
        (loss.sum() + (logits * drawn(2, 5, 48, seed=2)).sum()).backward()
        values = {"hidden": hidden, "logits": logits, "loss": loss, "noise": noise.grad}
        of_parameters = {
            name: parameter if degree > 1 and split_axis(parameter) is not None else parameter.grad
            for name, parameter in net.named_parameters()
        }
        return {**values, **of_parameters}

    return on_members(degree, lambda **group: Net(whole, **group), run)


@pytest.mark.parametrize("whole", [False, True])
def test_shards_have_the_bits_of_the_whole_layers(whole: bool) -> None:
    expected = trained(1, whole)
    assert len(expected) == 9
    for degree in (2, 4, 8):
        assert trained(degree, whole) == expected
    with job(1):
        plain = trained(1, whole)
    for name, value in plain.items():
        both = (np.frombuffer(each, "float32") for each in (expected[name], value))
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5, err_msg=name)


def bits(*tensors: Any) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def test_zeros_of_a_table_and_dropped_numbers_have_one_sign_at_every_degree() -> None:
    table = VocabParallelEmbedding(16, 8)
    table.weight.set_value(np.full((16, 8), -0.0, "float32"))
    assert not np.signbit(table(paddle.to_tensor([1, 9])).numpy()).any()
    inputs, parts = drawn(4, 16), []
    paddle.seed(5)
    whole = dropout(inputs, 0.3)
    for group in MEMBERS:
        paddle.seed(5)
        own = tensor_parallel.shard_of(inputs, -1, group.rank, 2)
        parts.append(dropout(own, 0.3, mp_group=group))
    assert bits(whole) == bits(paddle.concat(parts, -1))


@pytest.mark.parametrize(("size", "count"), [(64, 8), (12, 4), (7, 1)])
def test_a_size_has_as_many_blocks_as_a_power_of_two_divides(size: int, count: int) -> None:
    layer = ColumnParallelLinear(8, size)
    assert layer.count_blocks() == layer.weight.blocks.number == count


def test_without_trees_nothing_is_in_blocks() -> None:
    layer, x = ColumnParallelLinear(32, 64, has_bias=True), drawn(6, 32)
    with job(1):
        assert layer.count_blocks() == 0
        assert bits(layer(x)) == bits(F.linear(x, layer.weight, layer.bias))


class Halves(ColumnParallelLinear):
    blocks = 2


REFUSED: dict[str, Callable[[], Any]] = {
    r"(?s)shard \(=12 numbers\).*up to a multiple of 16": lambda: ColumnParallelLinear(
        6, 24, mp_group=MEMBERS[0]
    ),
    r"(?s)`Halves.blocks` \(=2\).*mp_degree \(=4\).*Halves.blocks = 8": lambda: Halves(
        6, 64, mp_group=Group(0, 78, [0, 1, 2, 3])
    ),
    "(?s)sequence parallelism.*ColumnParallelLinear and RowParallelLinear": lambda: (
        sequence.ColumnSequenceParallelLinear(6, 64, gather_output=False)
    ),
    "(?s)sequence parallelism.*as many as mp_degree": lambda: sequence.ScatterOp.apply(drawn(4, 4)),
    "(?s)_mp_allreduce.*parallel_matmul": lambda: replacements.OPERATIONS["_mp_allreduce"](
        drawn(4, 4), group=MEMBERS[0]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_depend_on_the_degree_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        REFUSED[words]()


def test_weight_gradients_of_blocks_can_wait() -> None:
    for layer, width in (
        (ColumnParallelLinear(32, 64, has_bias=True), 32),
        (RowParallelLinear(64, 32), 64),
    ):
        assert can_wait(layer)
        properties = inspect_call(layer.parameters(), layer.forward, (drawn(6, width),), {})
        assert properties.divisible
        assert properties.has_one_path
    assert can_wait(Halves(32, 64))


def test_fewer_blocks_are_those_of_a_class() -> None:
    assert Halves(6, 64, mp_group=MEMBERS[0]).count_blocks() == 1
