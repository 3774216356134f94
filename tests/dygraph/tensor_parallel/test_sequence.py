"""Sequence parallelism between tensor-parallel layers, its members being threads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.utils import sequence_parallel_utils as paddles

from fleetpipe import fleet
from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.tensor_parallel import groups, operations, replacements, sequence
from fleetpipe.errors import ConfigError, UsageError
from tests.dygraph.members import MEMBERS, on_all, threads
from tests.fixtures import Patch

Column, Row = sequence.ColumnSequenceParallelLinear, sequence.RowSequenceParallelLinear
#: A group of Paddle's for each thread: those of a process are told apart by their numbers.
OWN = [Group(rank, 90 + rank, [0, 1]) for rank in range(2)]


@pytest.fixture
def members() -> Iterator[list[Any]]:
    """Paddle's groups of two members, connected."""
    with threads(2) as connections:
        for group, connection in zip(OWN, connections):
            groups.connect(group, connection)
        yield OWN
        for group in OWN:
            groups.disconnect(group)


def trained(run: Any, inputs: Any, weights: Any) -> tuple[Any, Any]:
    """What ``run`` gives for ``inputs``, and their gradient."""
    inputs = inputs.detach().clone()
    inputs.stop_gradient = False
    output = run(inputs)
    (output * weights).sum().backward()
    return output.numpy(), inputs.grad.numpy()


def test_operations_are_each_others_gradients(members: list[Any]) -> None:
    whole, weights = paddle.rand([6, 3]), paddle.rand([6, 3])
    halves, of_weights = whole.split(2), weights.split(2)

    def results(group: Any) -> list[tuple[Any, Any]]:
        own = group.rank
        scaled = weights * (own + 1)
        return [
            trained(lambda x: operations.split(x, group, 0), whole, of_weights[own]),
            trained(lambda x: operations.gather(x, group, 0), halves[own], weights),
            trained(lambda x: operations.gather_parts(x, group), halves[own], scaled),
            trained(lambda x: operations.reduce_scatter(x, group), whole, of_weights[own]),
        ]

    for own, found in enumerate(on_all(members, results)):
        expected = [
            (halves[own], weights),
            (whole, of_weights[own]),
            (whole, of_weights[own] * 3),
            (halves[own] * 2, weights),
        ]
        for pair, other in zip(found, expected):
            assert all(np.allclose(one, two.numpy()) for one, two in zip(pair, other))


def test_layers_on_parts_are_the_dense_ones(members: list[Any]) -> None:
    inputs, weights = paddle.rand([6, 2, 4]), paddle.rand([6, 2, 4])
    paddle.seed(3)
    dense = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    dense[1].bias.set_value(paddle.rand([4]))
    expected = trained(dense, inputs, weights)
    layers = []
    for group in members:
        paddle.seed(3)
        column = Column(4, 8, has_bias=True, gather_output=False, mp_group=group)
        row = Row(8, 4, input_is_parallel=True, mp_group=group)
        row.bias.set_value(dense[1].bias)
        layers.append(nn.Sequential(column, row))

    def results(group: Any) -> Any:
        own = layers[group.rank]
        return trained(own, inputs.split(2)[group.rank], weights.split(2)[group.rank])

    parts = zip(*on_all(members, results))
    for found, whole in zip(parts, expected):
        assert np.allclose(np.concatenate(found), whole, atol=1e-6)
    for name, axis in (("0.weight", 1), ("0.bias", 0), ("1.weight", 0)):
        grads = [dict(own.named_parameters())[name].grad.numpy() for own in layers]
        whole = dict(dense.named_parameters())[name].grad.numpy()
        assert np.allclose(np.concatenate(grads, axis), whole, atol=1e-5)
    biases = [own[1].bias for own in layers]
    assert [tensor_parallel.marked(own.parameters()) for own in layers] == [[b] for b in biases]
    assert np.allclose(sum(b.grad.numpy() for b in biases), dense[1].bias.grad.numpy(), atol=1e-5)
    assert tensor_parallel.marked(copy.deepcopy(layers[0]).parameters())


def test_hooks_add_up_in_every_last_backward(members: list[Any], monkeypatch: Patch) -> None:
    model = nn.LayerNorm(4)
    sequence.mark_as_sequence_parallel_parameter(model.weight)
    topology = SimpleNamespace(get_model_parallel_group=lambda: MEMBERS[0])
    monkeypatch.setattr(groups, "hybrid_topology", lambda: topology)
    groups.connect(MEMBERS[0], Doubling())
    try:
        sequence.register_sequence_parallel_allreduce_hooks(model, 2, True)
        inputs = paddle.rand([3, 4])
        model(inputs).sum().backward()
        once = model.weight.grad.numpy().copy()
        model(inputs).sum().backward()
    finally:
        groups.disconnect(MEMBERS[0])
    assert np.allclose(model.weight.grad.numpy(), 4 * once)
    assert np.allclose(model.bias.grad.numpy(), 6.0)


class Doubling:
    """Members of which all have the same."""

    rank, ranks = 0, 2

    def all_reduce(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            tensor.set_value(tensor * 2)


def test_what_cannot_be_is_refused(members: list[Any]) -> None:
    with pytest.raises(ConfigError, match="gather_output=False"):
        Column(4, 8)
    with pytest.raises(ConfigError, match="input_is_parallel=True"):
        Row(8, 4)
    with pytest.raises(UsageError, match=r"(?s)axis 0 \(=5\).*pad the axis to 6"):
        operations.reduce_scatter(paddle.zeros([5, 2]), members[0])


def test_the_names_are_fleets() -> None:
    module = fleet.utils.sequence_parallel_utils
    for name in vars(paddles):
        assert hasattr(module, name), name
    assert module.mark_as_sequence_parallel_parameter is paddles.mark_as_sequence_parallel_parameter
    for name in ("ColumnSequenceParallelLinear", "RowSequenceParallelLinear"):
        own, other = (inspect.signature(getattr(m, name).__init__) for m in (module, paddles))
        assert [(p.name, p.default) for p in own.parameters.values()] == [
            (p.name, p.default) for p in other.parameters.values()
        ]


def test_paddles_own_classes_run_over_the_groups(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sequence, "model_parallel_group", lambda: MEMBERS[0])
    whole = paddle.rand([6, 3])
    replacements.install()
    groups.connect(MEMBERS[0], Alike())
    try:
        scattered = trained(paddles.ScatterOp.apply, whole, paddle.ones([3, 3]))
        reduced = trained(paddles.ReduceScatterOp.apply, whole, paddle.ones([3, 3]))
        gathered = trained(paddles.AllGatherOp.apply, whole, paddle.ones([12, 3]))
    finally:
        groups.disconnect(MEMBERS[0])
        replacements.uninstall()
    assert np.array_equal(scattered[0], whole[:3].numpy())
    assert np.array_equal(reduced[0], 2 * whole[:3].numpy())
    assert np.array_equal(gathered[0], np.concatenate([whole.numpy()] * 2))
    assert all(np.array_equal(g, np.full([6, 3], n)) for (_, g), n in ((reduced, 1), (gathered, 2)))


class Alike(Doubling):
    """Such members, further."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value]

    def reduce_scatter(self, parts: list[Any]) -> Any:
        return parts[0] * 2
