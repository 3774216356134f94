"""Tensor-parallel layers in one process: whole layers, shards of weights, refusals, operations."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.layers import mpu

from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    groups,
    operations,
)
from fleetpipe.dygraph.tensor_parallel.sequence import mark_as_sequence_parallel_parameter
from fleetpipe.errors import ConfigError, PeerFailed, StateError, UsageError
from fleetpipe.paddle_api import device
from tests.groups import MEMBERS, NAMES, Twins


def drawn(make: Callable[..., Any], *args: Any, **named: Any) -> tuple[Any, bytes]:
    """A layer made under seed 3, and what the generator gives after it."""
    paddle.seed(3)
    layer = make(*args, **named)
    return layer, paddle.rand([4]).numpy().tobytes()


def sliced(make: Any, *args: Any, **named: Any) -> list[Any]:
    """The layers of both members, drawn alike."""
    return [drawn(make, *args, mp_group=group, **named)[0] for group in MEMBERS]


def joined(layers: list[Any], name: str = "weight") -> Any:
    """The parameter of which two layers hold the slices."""
    held = [getattr(layer, name) for layer in layers]
    return np.concatenate([value.numpy() for value in held], axis=held[0].split_axis)


def trained(layer: Any, inputs: Any) -> list[bytes]:
    """The bits of output, input gradient and parameter gradients."""
    inputs = inputs.clone().detach()
    floating = inputs.dtype == paddle.float32
    inputs.stop_gradient = not floating
    output = layer(inputs)
    (output * paddle.arange(output.size, dtype="float32").reshape(output.shape)).sum().backward()
    found = [output, *([inputs.grad] if floating else []), *(p.grad for p in layer.parameters())]
    return [tensor.numpy().tobytes() for tensor in found]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parallel", [ColumnParallelLinear, RowParallelLinear])
def test_a_whole_linear_layer_is_the_dense_one_bit_for_bit(parallel: Any, bias: bool) -> None:
    dense, after_dense = drawn(nn.Linear, 6, 8, bias_attr=None if bias else False)
    whole, after_whole = drawn(parallel, 6, 8, has_bias=bias)
    assert after_whole == after_dense
    inputs = paddle.rand([2, 3, 6])
    assert trained(whole, inputs) == trained(dense, inputs)
    assert (whole.is_mp, whole.world_size, whole.rank) == (False, 1, 0)
    assert not any(parameter.is_distributed for parameter in whole.parameters())


def test_a_whole_embedding_is_the_dense_one_bit_for_bit() -> None:
    dense, _ = drawn(nn.Embedding, 10, 4, weight_attr=nn.initializer.XavierUniform())
    whole, _ = drawn(VocabParallelEmbedding, 10, 4)
    inputs = paddle.to_tensor([[1, 9, 1], [0, 5, 9]])
    assert trained(whole, inputs) == trained(dense, inputs)


@pytest.mark.parametrize("last", [(), (1,)])
def test_a_whole_cross_entropy_is_the_dense_one_bit_for_bit(last: tuple[int, ...]) -> None:
    label = paddle.to_tensor([[1, 9, 3], [0, 5, 3]]).reshape([2, 3, *last])
    dense = nn.CrossEntropyLoss(reduction="none", ignore_index=3)
    whole = ParallelCrossEntropy(ignore_index=3)
    found = []
    for criterion in (lambda x: dense(x, label.reshape([2, 3, 1])), lambda x: whole(x, label)):
        logits = paddle.to_tensor(np.random.default_rng(0).random((2, 3, 10), "float32"))
        logits.stop_gradient = False
        loss = criterion(logits)
        loss.sum().backward()
        assert loss.shape == [2, 3, 1]
        found.append((loss.numpy().tobytes(), logits.grad.numpy().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "initializer",
    [
        None,
        nn.initializer.Normal(0.0, 0.5),
        nn.initializer.KaimingUniform(),
        nn.initializer.Orthogonal(),
    ],
)
def test_slices_are_cut_from_the_weight_that_the_dense_layer_draws(initializer: Any) -> None:
    attr = paddle.ParamAttr(initializer=initializer)
    for parallel in (ColumnParallelLinear, RowParallelLinear):
        dense, after = drawn(nn.Linear, 6, 8, weight_attr=attr)
        layers = sliced(parallel, 6, 8, weight_attr=attr)
        assert np.array_equal(joined(layers), dense.weight.numpy())
        assert drawn(parallel, 6, 8, weight_attr=attr, mp_group=MEMBERS[1])[1] == after
    table = sliced(VocabParallelEmbedding, 10, 4, weight_attr=attr)
    whole, _ = drawn(VocabParallelEmbedding, 10, 4, weight_attr=attr)
    assert np.array_equal(joined(table), whole.weight.numpy())
    assert attr.initializer is initializer


def test_a_global_initializer_counts() -> None:
    nn.initializer.set_global_initializer(nn.initializer.Normal(3.0, 0.1))
    try:
        layers = sliced(ColumnParallelLinear, 6, 8)
        dense, _ = drawn(nn.Linear, 6, 8)
    finally:
        nn.initializer.set_global_initializer(None)
    assert np.array_equal(joined(layers), dense.weight.numpy())
    assert joined(layers).mean() > 2


def test_a_value_may_be_given_whole_or_as_the_slice_itself() -> None:
    value = np.arange(48, dtype="float32").reshape(6, 8)
    whole = nn.initializer.Assign(value)
    assert np.array_equal(joined(sliced(ColumnParallelLinear, 6, 8, weight_attr=whole)), value)
    own = nn.initializer.Assign(value[3:])
    layer = RowParallelLinear(6, 8, weight_attr=own, mp_group=MEMBERS[1])
    assert np.array_equal(layer.weight.numpy(), value[3:])


def test_marks_and_attributes_are_paddles() -> None:
    column = ColumnParallelLinear(6, 8, has_bias=True, gather_output=False, mp_group=MEMBERS[1])
    assert (column.weight.split_axis, column.bias.split_axis) == (1, 0)
    assert (column.weight.is_distributed, column.bias.is_distributed) == (True, True)
    assert (column.output_size_per_partition, column.gather_output) == (4, False)
    assert (column.is_mp, column.world_size) == (True, 2)
    assert column.model_parallel_group is MEMBERS[1]
    row = RowParallelLinear(6, 8, input_is_parallel=True, mp_group=MEMBERS[1])
    assert (row.weight.split_axis, row.weight.is_distributed) == (0, True)
    assert (row.bias.is_distributed, row.bias.shape) == (False, [8])
    assert (row.input_size_per_partition, row.input_is_parallel) == (3, True)
    table = VocabParallelEmbedding(10, 4, mp_group=MEMBERS[1])
    assert (table.weight.split_axis, table.weight.is_distributed) == (0, True)
    assert (table.vocab_start_index, table.num_embeddings, table.weight.shape) == (5, 10, [5, 4])
    assert ColumnParallelLinear(6, 8).bias is None
    assert RowParallelLinear(6, 8).bias is not None


@pytest.mark.parametrize("name", NAMES)
def test_constructors_take_what_paddles_take(name: str) -> None:
    def taken(cls: Any) -> list[tuple[str, Any]]:
        given = inspect.signature(cls.__init__).parameters.values()
        return [(parameter.name, parameter.default) for parameter in given]

    assert taken(getattr(tensor_parallel, name)) == taken(getattr(mpu, name))


def test_on_gpu_the_names_are_paddles(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("fleetpipe.dygraph.tensor_parallel")
    assert spec is not None
    assert spec.loader is not None
    on_gpu = module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(device, "device_kind", lambda: "gpu")
        spec.loader.exec_module(on_gpu)
    assert all(vars(on_gpu)[name] is getattr(mpu, name) for name in NAMES)
    assert not any(getattr(tensor_parallel, name) is getattr(mpu, name) for name in NAMES)
    assert tensor_parallel.get_rng_state_tracker is mpu.get_rng_state_tracker
    assert tensor_parallel.model_parallel_random_seed is mpu.model_parallel_random_seed


def test_the_random_state_tracker_works_on_cpu() -> None:
    tracker = tensor_parallel.RNGStatesTracker()
    paddle.seed(5)
    expected = paddle.rand([6]).numpy()
    paddle.seed(7)
    tracker.add("ours", 5)
    with tracker.rng_state("ours"):
        first = paddle.rand([3]).numpy()
    outside = paddle.rand([3]).numpy()
    with tracker.rng_state("ours"):
        second = paddle.rand([3]).numpy()
    assert np.array_equal(np.concatenate([first, second]), expected)
    paddle.seed(7)
    assert np.array_equal(outside, paddle.rand([3]).numpy())


def test_a_copy_shares_the_group_and_keeps_the_marks() -> None:
    layer = ColumnParallelLinear(6, 8, has_bias=True, mp_group=MEMBERS[1])
    mark_as_sequence_parallel_parameter(layer.bias)
    other = copy.deepcopy(layer)
    assert tensor_parallel.marked(other.parameters()) == [other.bias]
    assert other.model_parallel_group is layer.model_parallel_group
    assert (other.weight.is_distributed, other.weight.split_axis, other.bias.split_axis) == (
        True,
        1,
        0,
    )
    assert other.weight is not layer.weight
    assert np.array_equal(other.weight.numpy(), layer.weight.numpy())


def test_a_layer_may_be_built_lazily() -> None:
    with paddle.LazyGuard():
        lazy = ColumnParallelLinear(6, 8, mp_group=MEMBERS[1])
    assert (lazy.weight.shape, lazy.weight.split_axis) == ([6, 4], 1)
    paddle.seed(3)
    lazy.weight.initialize()
    built, _ = drawn(ColumnParallelLinear, 6, 8, mp_group=MEMBERS[1])
    assert np.array_equal(lazy.weight.numpy(), built.weight.numpy())


@pytest.mark.skipif(not hasattr(nn.Layer, "sharded_state_dict"), reason="not on 2.6.2")
def test_a_sharded_state_says_where_the_slices_lie() -> None:
    layer = ColumnParallelLinear(6, 8, has_bias=True, mp_group=MEMBERS[1])
    state = layer.sharded_state_dict("head.")
    assert state["head.weight"].global_shape == (6, 8)
    assert state["head.weight"].global_offset == (0, 4)
    assert state["head.bias"].global_offset == (4,)
    row = RowParallelLinear(6, 8, mp_group=MEMBERS[1]).sharded_state_dict()
    assert row["weight"].global_offset == (3, 0)
    assert row["bias"].global_shape == (8,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColumnParallelLinear(6, 7, mp_group=MEMBERS[0]),
        lambda: RowParallelLinear(7, 6, mp_group=MEMBERS[0]),
        lambda: VocabParallelEmbedding(7, 6, mp_group=MEMBERS[0]),
    ],
)
def test_a_size_that_cannot_be_cut_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"\(=7\) must be divisible by .* degree \(=2\)"):
        make()


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(UsageError, match="no member"):
        ColumnParallelLinear(6, 8, mp_group=Group(-1, 78, [2, 3]))


def test_a_launched_job_must_begin_before_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "hybrid_topology", lambda: None)
    assert not ColumnParallelLinear(6, 8).is_mp
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match=r"before fleet\.init"):
        ColumnParallelLinear(6, 8)


def test_connections_of_another_group_are_refused() -> None:
    with pytest.raises(UsageError, match="member 0 of 3"):
        groups.connect(MEMBERS[0], Twins(3))


@pytest.mark.parametrize(("width", "parallel", "expected"), [(3, False, "6"), (6, True, "3")])
def test_an_input_of_the_wrong_kind_is_refused(width: int, parallel: bool, expected: str) -> None:
    row = RowParallelLinear(6, 8, input_is_parallel=parallel, mp_group=MEMBERS[0])
    with pytest.raises(UsageError, match=f"(?s)={width}.*expected: {expected}"):
        row(paddle.rand([2, width]))


@pytest.mark.parametrize("unknown", [-1, 10])
def test_an_id_outside_the_vocabulary_is_refused(unknown: int) -> None:
    table = VocabParallelEmbedding(10, 4, mp_group=MEMBERS[0])
    with pytest.raises(UsageError, match=f"(?s)={unknown}.*0 to 9"):
        table(paddle.to_tensor([0, unknown]))


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (np.zeros((2, 3, 5), "float32"), "soft"),
        (np.zeros((2, 3, 5), "int64"), "shape"),
        (np.zeros((3,), "int64"), "shape"),
        (np.full((2, 3), 10), "label"),
        (np.full((2, 3), -1), "label"),
    ],
)
def test_labels_that_do_not_fit_are_refused(label: Any, says: str) -> None:
    criterion = ParallelCrossEntropy(mp_group=MEMBERS[0])
    with pytest.raises(UsageError, match=says):
        criterion(paddle.rand([2, 3, 5]), paddle.to_tensor(label))


def test_an_input_that_needs_no_gradient_costs_no_collective(twins: Twins) -> None:
    layer = ColumnParallelLinear(6, 8, gather_output=False, mp_group=MEMBERS[0])
    layer(paddle.rand([2, 6])).sum().backward()
    assert layer.weight.grad is not None
    assert twins.gathered == 0


def test_weight_gradients_alone_cost_no_collective(twins: Twins) -> None:
    """What lets a schedule with split backward do W while the other members do something else."""
    for make in (
        lambda: ColumnParallelLinear(6, 8, has_bias=True, mp_group=MEMBERS[0]),
        lambda: RowParallelLinear(6, 8, mp_group=MEMBERS[0]),
    ):
        layer = make()
        inputs = paddle.rand([2, 6])
        inputs.stop_gradient = False
        output = layer(inputs)
        grad = paddle.ones_like(output)
        before = twins.gathered
        (input_grad,) = paddle.grad(output, inputs, grad, retain_graph=True)
        assert input_grad.shape == [2, 6]
        assert twins.gathered == before + 1
        grads = paddle.grad(
            output, layer.parameters(), grad, retain_graph=False, no_grad_vars=[inputs]
        )
        assert [list(g.shape) for g in grads] == [list(p.shape) for p in layer.parameters()]
        assert twins.gathered == before + 1


def test_large_sums_among_many_take_the_ring() -> None:
    group = Twins(3)
    assert np.array_equal(groups.total(paddle.ones([4]), group).numpy(), np.full(4, 3.0))
    assert (group.gathered, group.reduced) == (1, 0)
    large = paddle.ones([65537])
    assert np.array_equal(groups.total(large, group).numpy(), np.full(65537, 3.0))
    assert (group.gathered, group.reduced) == (1, 1)
    assert float(large[0]) == 1.0


def test_what_is_sent_does_not_change_afterwards() -> None:
    tensor = paddle.ones([4])
    first, _ = groups.gather(tensor, Twins())
    tensor.add_(tensor)
    assert np.array_equal(first.numpy(), np.ones(4))


def test_an_error_in_backward_keeps_its_type() -> None:
    class Gone(Twins):
        def all_gather(self, value: Any) -> list[Any]:
            raise PeerFailed("member 1 left")

    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    output = operations.identity(tensor, Gone()).sum()
    with pytest.raises(PeerFailed, match="member 1 left"), tensor_parallel.own_errors():
        output.backward()
    with pytest.raises(ValueError, match="other"), tensor_parallel.own_errors():
        raise ValueError("other")
