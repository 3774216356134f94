"""Tied weights: one parameter in one process, copies that stay equal on several ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.state.tied_weights import SharedWeight, SharedWeights, holders
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.dygraph import tied
from tests.dygraph.models import MODELS
from tests.groups import members, on_all
from tests.pipelines import job, model_in_job, pipeline

MICRO_BATCHES = 4
WEIGHT = "shared_layers.embed.table.weight"


def gradients(model: Any) -> dict[str, Any]:
    """The gradient of each parameter, by its name in the whole model."""
    return {name: tensor.grad.numpy() for name, tensor in model.items() if tensor.grad is not None}


def by_hand(pipe: Any, data: list[Any]) -> dict[str, Any]:
    """The gradients of the single model, which accumulates them micro-batch by micro-batch."""
    single = pipe.layers.single_model()
    pipe.layers.copy_to(single)
    for inputs, labels in zip(*(tensor.split(MICRO_BATCHES) for tensor in data)):
        (tied.loss(single(inputs), labels) / MICRO_BATCHES).backward()
    return gradients(single.state_dict())


def require_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every gradient, and the norm of all together, is the expected one but for rounding."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(found[name] - gradient)
        assert error <= 1e-6 * np.linalg.norm(gradient) + 1e-9, name
    norms = [
        np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
        for grads in (found, expected)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.once_for("True")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("FThenB", None), ("1F1B", None), ("Interleaved1F1B", 2), ("ZBH1", None), ("ZBV", None)],
)
@pytest.mark.parametrize("middle", [False, True])
def test_all_gradients_are_the_single_models(
    middle: bool, schedule: str, chunks: int | None, ranks: int
) -> None:
    with job(ranks, MICRO_BATCHES, schedule):
        pipe = pipeline(tied.layers(middle), loss_fn=tied.loss, num_virtual_pipeline_stages=chunks)
        names = [name for name, _ in pipe.layers.named_parameters()]
        assert names[:2] == ["shared_layers.embed.scale", WEIGHT]
        assert len(set(map(id, pipe.parameters()))) == len(names)
        data = MODELS["gpt"].batch(MICRO_BATCHES, 0)
        expected = by_hand(pipe, data)
        for _ in range(2):
            # Twice: the second batch must not find anything that the first left.
            pipe.forward_backward_pipeline(data)
            require_close(gradients(pipe.layers.state_dict()), expected)
            for parameter in pipe.parameters():
                parameter.clear_gradient(set_to_zero=False)


def test_one_stage_has_the_bits_of_the_single_model() -> None:
    with model_in_job(1, MICRO_BATCHES, layers=tied.layers(), loss_fn=tied.loss) as pipe:
        data = MODELS["gpt"].batch(MICRO_BATCHES, 0)
        expected = by_hand(pipe, data)
        pipe.forward_backward_pipeline(data)
        for name, gradient in gradients(pipe.layers.state_dict()).items():
            assert gradient.tobytes() == expected[name].tobytes(), name


def test_the_cut_does_not_change_initial_weights() -> None:
    starts = []
    for ranks in (1, 3):
        with job(ranks):
            layers = pipeline(tied.layers(), loss_fn=tied.loss).layers
            starts.append({n: t.numpy().tobytes() for n, t in layers.full_state_dict().items()})
    assert starts[0] == starts[1]


def played(ranks: int, weights: list[SharedWeight], act: Any) -> list[dict[str, Any]]:
    """Runs ``act(rank, tensors, copies)`` on every rank; returns each rank's tensors."""
    groups = {weight.holders: members(len(weight.holders)) for weight in weights}
    everyones: list[dict[str, Any]] = []
    for rank in range(ranks):
        held = [w.name for w in weights if rank in w.holders]
        layers = {name: paddle.nn.Linear(4, 4, bias_attr=False) for name in held}
        everyones.append({name: layer.weight for name, layer in layers.items()})

    def run(rank: int) -> None:
        tensors = everyones[rank]
        act(
            rank,
            tensors,
            SharedWeights(weights, tensors, rank, lambda held: groups[held][held.index(rank)]),
        )

    assert on_all(ranks, run) == [None] * ranks
    return everyones


def noise(seed: int) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal((4, 4)).astype("float32"))


EVERYWHERE = [SharedWeight("a", (0, 1, 2)), SharedWeight("b", (0, 1, 2))]


def test_the_sum_over_three_ranks_has_the_same_bits_on_all() -> None:
    def act(rank: int, tensors: dict[str, Any], copies: SharedWeights) -> None:
        tensors["a"].grad = noise(rank)
        if rank == 1:
            tensors["b"].grad = noise(7)
        copies.sum_gradients()

    everyones = played(3, EVERYWHERE, act)
    # From the last user to the first, as backward adds.
    expected = (noise(2) + noise(1)) + noise(0)
    for tensors in everyones:
        assert tensors["a"].grad.numpy().tobytes() == expected.numpy().tobytes()
        assert tensors["b"].grad.numpy().tobytes() == noise(7).numpy().tobytes()


def test_a_weight_that_nobody_used_has_no_gradient() -> None:
    everyones = played(3, EVERYWHERE, lambda _rank, _tensors, copies: copies.sum_gradients())
    assert all(tensor.grad is None for tensors in everyones for tensor in tensors.values())


def test_a_main_gradient_is_summed_in_its_place() -> None:
    def act(rank: int, tensors: dict[str, Any], copies: SharedWeights) -> None:
        for tensor in tensors.values():
            tensor.main_grad = noise(rank)
        copies.sum_gradients()

    for tensors in played(2, [SharedWeight("a", (0, 1))], act):
        assert tensors["a"].grad is None
        assert tensors["a"].main_grad.numpy().tobytes() == (noise(1) + noise(0)).numpy().tobytes()


def test_only_sharing_ranks_meet_and_each_weight_has_its_own() -> None:
    weights = [
        SharedWeight("alone", (1,)),
        SharedWeight("ends", (0, 3)),
        SharedWeight("all", (0, 1, 3)),
        SharedWeight("late", (3, 1)),
    ]

    def act(rank: int, tensors: dict[str, Any], copies: SharedWeights) -> None:
        for tensor in tensors.values():
            tensor.grad = paddle.full([4, 4], 10.0**rank)
        copies.equalize({"all": 1})
        copies.sum_gradients()

    everyones = played(4, weights, act)
    assert everyones[2] == {}
    for name, users, source in [("ends", (0, 3), 0), ("all", (0, 1, 3), 1), ("late", (3, 1), 3)]:
        for rank in users:
            tensor = everyones[rank][name]
            assert float(tensor.grad[0, 0]) == sum(10.0**user for user in users)
            assert tensor.numpy().tobytes() == everyones[source][name].numpy().tobytes()
            assert tensor.is_firstly_shared == (rank == users[0])
    assert float(everyones[1]["alone"].grad[0, 0]) == 10.0


def test_a_sparse_gradient_is_refused() -> None:
    layer = paddle.nn.Embedding(4, 4, sparse=True)
    layer(paddle.to_tensor([1])).sum().backward()
    copies = SharedWeights(
        [SharedWeight("a", (0, 1))], {"a": layer.weight}, 0, lambda _: members(2)[0]
    )
    with pytest.raises(ConfigError, match="sparse"):
        copies.sum_gradients()


@pytest.mark.parametrize(("pp", "sparse"), [(2, True), (2, False), (1, True)])
def test_a_sparse_table_on_several_ranks_is_refused_when_it_is_built(pp: int, sparse: bool) -> None:
    table = SharedLayerDesc("table", paddle.nn.Embedding, None, "weight", 8, 4, sparse=sparse)
    refused = pp > 1 and sparse
    with pytest.raises(ConfigError, match="sparse") if refused else contextlib.nullcontext():
        PipelineLayer([table, LayerDesc(paddle.nn.Linear, 4, 4), table], num_stages=pp)


def test_who_holds_what_under_a_vee() -> None:
    layers = (
        SharedLayer("shared_layers", "k", (0, 5), {"w": "shared_layers.k.w"}, {}),
        SharedLayer("shared_layers", "k", (2,), {"t": "shared_layers.k.w", "b": "2.b"}, {}),
    )
    ranks = [0, 1, 2, 2, 1, 0]
    found = {weight.name: weight.holders for weight in holders(layers, ranks.__getitem__)}
    assert found == {"shared_layers.k.w": (0, 2), "2.b": (2,)}
