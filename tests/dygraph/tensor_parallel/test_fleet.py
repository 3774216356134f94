"""Tensor and sequence parallelism as scripts for Fleet use it, beside the single-device model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.layers import mpu
from paddle.distributed.fleet.utils import sequence_parallel_utils as paddles

from fleetpipe import fleet
from fleetpipe.dygraph import tensor_parallel
from fleetpipe.dygraph.optimizer.clip_global import SlicedNormClip
from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    groups,
    operations,
    replacements,
    sequence,
)
from fleetpipe.errors import CheckpointError, ConfigError, StateError, UsageError
from fleetpipe.mesh.parts import local_tensor_of
from tests.fixtures import Patch
from tests.groups import MEMBERS, NAMES, Twins, on_all, thread_members
from tests.pipelines import job, pipeline

#: Of random streams.
OF_RANDOM = ("get_rng_state_tracker", "model_parallel_random_seed", "RNGStatesTracker")


def with_gradient(operation: Callable[[Any], Any], inputs: Any) -> tuple[Any, Any]:
    """What an operation makes of ``inputs``, and the gradient for counting numbers."""
    inputs = inputs.clone().detach()
    inputs.stop_gradient = False
    output = operation(inputs)
    weights = paddle.arange(output.size, dtype="float32").reshape(output.shape)
    (output * weights).sum().backward()
    return output.numpy(), inputs.grad.numpy()


PAIRS = {
    "_c_identity": operations.identity,
    "_c_split": operations.split,
    "_c_concat": operations.gather,
    "_mp_allreduce": operations.all_reduce,
}


@pytest.mark.parametrize("name", PAIRS)
def test_operations_go_by_paddles_names(name: str, twins: Twins) -> None:
    named = tensor_parallel.OPERATIONS[name]
    inputs = paddle.rand([2, 6])
    ours = with_gradient(lambda x: PAIRS[name](x, MEMBERS[0]), inputs)
    theirs = with_gradient(lambda x: named(x, group=MEMBERS[0]), inputs)
    assert all(np.array_equal(*pair) for pair in zip(ours, theirs))
    assert named(inputs, group=Group(-1, 78, [2, 3])) is None
    given = inspect.signature(named).parameters
    assert list(given) == list(inspect.signature(getattr(mpu.mp_ops, name)).parameters)


def test_the_lookup_and_the_loss_go_by_paddles_names(twins: Twins) -> None:
    table = paddle.rand([5, 4])
    rows = tensor_parallel.OPERATIONS["_c_lookup_table"](table, paddle.to_tensor([4, 7, 9]), 5)
    assert np.array_equal(rows.numpy(), np.stack([np.zeros(4), *table.numpy()[[2, 4]]]))
    logits, label = paddle.rand([2, 3, 5]), paddle.to_tensor([[1, 9, 3], [0, 5, 3]])
    loss = tensor_parallel.OPERATIONS["_c_softmax_with_cross_entropy"]
    expected = ParallelCrossEntropy(MEMBERS[0])(logits, label)
    assert np.array_equal(loss(logits, label, group=MEMBERS[0]).numpy(), expected.numpy())
    with pytest.raises(ConfigError, match="return_softmax"):
        loss(logits, label, group=MEMBERS[0], return_softmax=True)
    with pytest.raises(ConfigError, match="SUM"):
        tensor_parallel.OPERATIONS["_mp_allreduce"](logits, op=paddle.distributed.ReduceOp.MAX)


def test_paddles_modules_have_the_operations_while_they_are_installed() -> None:
    modules = (paddle.distributed.collective, mpu.mp_ops)
    before = [getattr(module, name) for module in modules for name in replacements.OPERATIONS]
    replacements.install()
    try:
        for module in modules:
            for name, operation in replacements.OPERATIONS.items():
                assert getattr(module, name) is operation
    finally:
        replacements.uninstall()
    after = [getattr(module, name) for module in modules for name in replacements.OPERATIONS]
    assert all(one is other for one, other in zip(before, after))


def test_a_tied_head_computes_the_logits_of_its_own_rows(twins: Twins) -> None:
    table = VocabParallelEmbedding(10, 4, mp_group=MEMBERS[0]).weight
    hidden = paddle.rand([3, 4])

    def head(gather: bool) -> Callable[[Any], Any]:
        return lambda x: tensor_parallel.parallel_matmul(x, table, gather, MEMBERS[0])

    own, own_grad = with_gradient(head(False), hidden)
    # The very product: a transposed copy of the table has other bits on some CPUs.
    assert np.array_equal(own, paddle.matmul(hidden, table, transpose_y=True).numpy())
    gathered, _ = with_gradient(head(True), hidden)
    assert np.array_equal(gathered, np.concatenate([own, own], axis=1))
    dense = table.detach()
    _, dense_grad = with_gradient(lambda x: tensor_parallel.parallel_matmul(x, dense), hidden)
    assert np.allclose(own_grad, 2 * dense_grad)


@pytest.mark.parametrize(("heads", "share"), [(4, 2), (3, None)])
def test_a_models_own_code_may_ask_for_its_share(heads: int, share: int | None) -> None:
    if share is None:
        with pytest.raises(ConfigError, match=r"`num_heads` \(=3\) must be divisible"):
            tensor_parallel.share_of(heads, "num_heads", MEMBERS[0])
    else:
        assert tensor_parallel.share_of(heads, "num_heads", MEMBERS[0]) == share
    with tensor_parallel.alone():
        assert tensor_parallel.share_of(heads, "num_heads", MEMBERS[0]) == heads


def test_alone_runs_with_one_member(twins: Twins) -> None:
    criterion = ParallelCrossEntropy(MEMBERS[0])
    logits, label = paddle.rand([2, 3, 10]), paddle.to_tensor([[1, 9, 3], [0, 5, 3]])
    with tensor_parallel.alone():
        loss = criterion(logits, label)
        same = tensor_parallel.OPERATIONS["_c_concat"](logits, group=MEMBERS[0])
    dense = nn.functional.cross_entropy(logits, label.unsqueeze(-1), reduction="none")
    assert np.array_equal(loss.numpy(), dense.numpy())
    assert same is logits
    assert twins.gathered == 0


def test_alone_fleets_topology_has_one_member(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(2):
        hcg = fleet.get_hybrid_communicate_group()
        monkeypatch.setattr(hcg, "_mp_degree", 2)
        with tensor_parallel.alone():
            within = fleet.get_hybrid_communicate_group()
            assert within.get_model_parallel_world_size() == 1
            assert within.get_pipe_parallel_world_size() == 2
        assert fleet.get_hybrid_communicate_group() is hcg


def test_the_wrapper_calls_the_model_and_holds_its_parameters() -> None:
    with job(1):
        model = nn.Linear(6, 4)
        wrapped = fleet.meta_parallel.TensorParallel(model, fleet.get_hybrid_communicate_group())
        inputs = paddle.rand([2, 6])
        assert np.array_equal(wrapped(inputs).numpy(), model(inputs).numpy())
        assert [*wrapped.state_dict()] == ["_layers.weight", "_layers.bias"]
    with pytest.raises(StateError, match=r"fleet\.init"):
        fleet.meta_parallel.TensorParallel(model)


def test_a_parameter_that_is_called_distributed_and_not_cut_is_each_members_own() -> None:
    """As the gate of DeepseekV3 in PaddleFormers, with one member too."""

    def marked() -> Any:
        model = nn.Linear(6, 4)
        model.weight.is_distributed = True
        return model

    with job(1):
        model = marked()
        assert fleet.distributed_model(model).state_dict()
        assert tensor_parallel.whole_shape(model.weight) == (6, 4)
        assert pipeline([model], num_stages=1)._layers.single_model().parameters()
    with pytest.raises(CheckpointError, match="is_distributed, and no split_axis"):
        local_tensor_of(model.weight, lambda: (0, 2))

    threads = thread_members(2)

    def shared(rank: int) -> list[float]:
        model = marked()
        for parameter in model.parameters():
            parameter.set_value(paddle.full_like(parameter, rank))
        tensor_parallel.share_whole_state(model.state_dict(), threads[rank])
        return [float(parameter.mean()) for parameter in model.parameters()]

    assert on_all(2, shared) == [[0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("path", ["meta_parallel", "meta_parallel.parallel_layers", "layers.mpu"])
def test_every_path_below_fleet_gives_the_layers_and_the_tracker(path: str) -> None:
    own = {name: getattr(tensor_parallel, name) for name in (*NAMES, *OF_RANDOM)}
    inner = "meta_parallel.parallel_layers" if path == "meta_parallel" else path
    for module, names in (("", own), (".mp_layers", NAMES), (".random", OF_RANDOM)):
        found = importlib.import_module(f"fleetpipe.fleet.{inner if module else path}{module}")
        assert all(getattr(found, name) is own[name] for name in names)
        theirs = importlib.import_module(found.__name__.replace("fleetpipe", "paddle.distributed"))
        assert all(hasattr(found, name) for name in vars(theirs))


def test_the_operations_stand_below_fleet() -> None:
    assert fleet.layers.mpu.mp_ops._c_identity is tensor_parallel.OPERATIONS["_c_identity"]
    assert fleet.layers.mpu.mp_ops._set_var_distributed is mpu.mp_ops._set_var_distributed


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
def test_slices_are_dropped_where_the_whole_would_be(axis: int, mode: str) -> None:
    whole = paddle.rand([3, 4, 6])
    paddle.seed(5)
    expected = nn.functional.dropout(whole, 0.4, mode=mode)
    parts = []
    for group in MEMBERS:
        paddle.seed(5)
        own = tensor_parallel.shard_of(whole, axis, group.rank, 2)
        parts.append(tensor_parallel.dropout(own, 0.4, axis, mode=mode, mp_group=group))
    found = paddle.concat(parts, axis=axis).numpy()
    assert np.array_equal(found == 0, expected.numpy() == 0)
    assert 0 < (found == 0).sum() < whole.size
    assert np.allclose(found, expected.numpy())


def test_dropout_of_whole_tensors_and_in_evaluation_is_paddles() -> None:
    inputs = paddle.rand([3, 4])
    paddle.seed(5)
    expected = nn.functional.dropout(inputs, 0.4).numpy()
    paddle.seed(5)
    assert np.array_equal(tensor_parallel.dropout(inputs, 0.4).numpy(), expected)
    for mode in ("upscale_in_train", "downscale_in_infer"):
        plain = nn.functional.dropout(inputs, 0.4, training=False, mode=mode)
        ours = tensor_parallel.dropout(inputs, 0.4, -1, False, mode, MEMBERS[0])
        assert np.array_equal(ours.numpy(), plain.numpy())


def test_a_group_of_this_rank_alone_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Paddle makes them in a job of several ranks: nobody is in such a group, it says."""
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    layer = ColumnParallelLinear(6, 8, mp_group=Group(-1, 79, [3]))
    assert (layer.is_mp, layer.rank) == (False, 0)


def test_a_slice_that_was_built_already_is_not_taken_for_the_whole() -> None:
    layers = [nn.Linear(6, 6), ColumnParallelLinear(6, 8, mp_group=MEMBERS[0])]
    with job(1):
        model = fleet.meta_parallel.PipelineLayer(layers, num_stages=1, loss_fn=nn.MSELoss())
        with pytest.raises(ConfigError, match="layer 1 of the list, a ColumnParallelLinear"):
            model.single_model()


def test_a_clip_by_norm_takes_the_norm_of_the_whole_gradient(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = SimpleNamespace(get_model_parallel_group=lambda: MEMBERS[0])
    monkeypatch.setattr(groups, "hybrid_topology", lambda: topology)
    cut, biased = ColumnParallelLinear(6, 8), RowParallelLinear(6, 8)
    biased.weight.need_clip = False
    pairs = [(p, paddle.ones_like(p)) for p in (cut.weight, biased.weight, biased.bias)]
    clip = SlicedNormClip(nn.ClipGradByNorm(2.0))
    clipped = clip([*pairs, (nn.Linear(2, 2).weight, None)])
    assert [parameter is p for (parameter, _), (p, _) in zip(clipped, pairs)] == [True] * 3
    norms = [float(paddle.linalg.norm(grad)) for _, grad in clipped]
    # 24 ones here and 24 on the other member; a slice that is not clipped; a whole bias.
    assert np.allclose(norms, [2.0 * (24 / 48) ** 0.5, 24**0.5, 2.0])
    assert twins.gathered == 1


Column, Row = sequence.ColumnSequenceParallelLinear, sequence.RowSequenceParallelLinear


def trained(run: Any, inputs: Any, weights: Any) -> tuple[Any, Any]:
    """What ``run`` gives for ``inputs``, and their gradient."""
    inputs = inputs.detach().clone()
    inputs.stop_gradient = False
    output = run(inputs)
    (output * weights).sum().backward()
    return output.numpy(), inputs.grad.numpy()


def test_hooks_add_up_in_every_last_backward(monkeypatch: Patch) -> None:
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


def test_what_cannot_be_is_refused(twins: Twins) -> None:
    with pytest.raises(ConfigError, match="gather_output=False"):
        Column(4, 8)
    with pytest.raises(ConfigError, match="input_is_parallel=True"):
        Row(8, 4)
    with pytest.raises(UsageError, match=r"(?s)axis 0 \(=5\).*pad the axis to 6"):
        operations.reduce_scatter(paddle.zeros([5, 2]), MEMBERS[0])


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
