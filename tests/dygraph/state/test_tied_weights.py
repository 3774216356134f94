"""Tied weights are one parameter on one rank, and copies that stay equal on several."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.dygraph.layers.tied import SharedLayer
from fleetpipe.dygraph.state.single_model import copy_layers
from fleetpipe.dygraph.state.tied_weights import SharedWeight, SharedWeights, holders
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import (
    LayerDesc,
    LocalSharedLayerDesc,
    PipelineLayer,
    SharedLayerDesc,
)
from fleetpipe.paddle_api.tensor import shares_memory
from tests.dygraph import models
from tests.dygraph.models import MODELS, VOCABULARY, WIDTH, FeedForward
from tests.groups import on_all, thread_members
from tests.pipelines import accumulate, adam, job, model_in_job, pipeline, train

MICRO_BATCHES = 4
WEIGHT = "shared_layers.embed.table.weight"


def gradients(model: Any) -> dict[str, Any]:
    """The gradient of each parameter, by its name in the whole model."""
    return {name: tensor.grad.numpy() for name, tensor in model.items() if tensor.grad is not None}


def by_hand(pipe: Any, data: list[Any]) -> dict[str, Any]:
    """The gradients of the single model, which accumulates them micro-batch by micro-batch."""
    single = pipe.layers.single_model()
    pipe.layers.copy_to(single)
    parts = zip(*(tensor.split(MICRO_BATCHES) for tensor in data))
    accumulate(models.loss(single(inputs), labels) / MICRO_BATCHES for inputs, labels in parts)
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
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("FThenB", None), ("1F1B", None), ("Interleaved1F1B", 2), ("ZBH1", None), ("ZBV", None)],
)
@pytest.mark.parametrize(
    ("middle", "ranks"), [(True, 1), (True, 2), (True, 3), (False, 2), (False, 4)]
)
def test_all_gradients_are_the_single_models(
    middle: bool, ranks: int, schedule: str, chunks: int | None
) -> None:
    options = {"loss_fn": models.loss, "num_virtual_pipeline_stages": chunks}
    layers = models.layers(middle)
    with model_in_job(ranks, MICRO_BATCHES, schedule, layers=layers, **options) as pipe:
        names = [name for name, _ in pipe.layers.named_parameters()]
        assert names[:2] == ["shared_layers.embed.scale", WEIGHT]
        assert len(set(map(id, pipe.parameters()))) == len(names)
        data = MODELS["gpt"].batch(MICRO_BATCHES, 0)
        expected = by_hand(pipe, data)
        for _ in range(2):
            # Twice: the second batch must not find anything that the first left.
            pipe.forward_backward_pipeline(data)
            found = gradients(pipe.layers.state_dict())
            require_close(found, expected)
            for parameter in pipe.parameters():
                parameter.clear_gradient(set_to_zero=False)
        if (ranks, schedule) == (1, "1F1B"):
            assert all(found[name].tobytes() == g.tobytes() for name, g in expected.items())


def played(ranks: int, weights: list[SharedWeight], act: Any) -> list[dict[str, Any]]:
    """Runs ``act(rank, tensors, copies)`` on every rank; returns each rank's tensors."""
    groups = {weight.holders: thread_members(len(weight.holders)) for weight in weights}
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


def test_the_sum_over_three_ranks_has_the_same_bits_on_all() -> None:
    """Of what all have, one has, and none has; and main gradients in their place."""

    def act(rank: int, tensors: dict[str, Any], copies: SharedWeights) -> None:
        tensors["a"].grad = noise(rank)
        if rank == 1:
            tensors["b"].grad = noise(7)
        tensors["d"].main_grad = noise(rank)
        copies.sum_gradients()

    everyones = played(3, [SharedWeight(name, (0, 1, 2)) for name in "abcd"], act)
    # From the last user to the first, as backward adds.
    expected = ((noise(2) + noise(1)) + noise(0)).numpy().tobytes()
    for tensors in everyones:
        assert tensors["a"].grad.numpy().tobytes() == expected
        assert tensors["b"].grad.numpy().tobytes() == noise(7).numpy().tobytes()
        assert tensors["c"].grad is tensors["d"].grad is None
        assert tensors["d"].main_grad.numpy().tobytes() == expected


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
        [SharedWeight("a", (0, 1))], {"a": layer.weight}, 0, lambda _: thread_members(2)[0]
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


#: The fully qualified name of the weight that the entries below share.
TIED = "local_shared_layers.embed.table.weight"


class Head(nn.Layer):
    """A head that takes the embedding's weight, and keeps it under a name of its own."""

    def __init__(self, embedding_weight: Any = None) -> None:
        super().__init__()
        self.rows = embedding_weight
        if embedding_weight is None:
            self.rows = self.create_parameter([VOCABULARY, WIDTH])
        self.bias = self.create_parameter([VOCABULARY], is_bias=True)

    @property
    def embedding_weight(self) -> Any:
        """The tied weight, for ``SharedLayerDesc``."""
        return self.rows

    def forward(self, x: Any) -> Any:
        return paddle.matmul(x, self.rows, transpose_y=True) + self.bias


def entries(kind: Any = LocalSharedLayerDesc, last: Any = Head) -> list[Any]:
    """An embedding, two blocks, and a head that shares the embedding's weight."""
    return [
        kind("embed", models.Tokens, None, "embedding_weight"),
        LayerDesc(FeedForward),
        LayerDesc(FeedForward),
        kind("embed", last, None, "embedding_weight"),
    ]


WITH_HEAD = [
    *models.layers()[:-1],
    SharedLayerDesc("embed", models.Head, None, "embedding_weight"),
]


def test_the_names_are_fleets_and_the_weight_is_one() -> None:
    layers = PipelineLayer(entries(), num_stages=1)
    embed, *_, head = layers.run_function
    assert head.rows is embed.table.weight
    assert list(layers.local_shared_layers) == ["embed"]
    names = list(layers.state_dict())
    assert names[:2] == ["local_shared_layers.embed.scale", TIED]
    assert "3.rows" in names
    assert [slot.name for slot in layers.state.slots()].count(TIED) == 1
    assert len(layers.parameters()) == len(names) - 1


@pytest.mark.parametrize("schedule", ["DualPipeV", "ZBV"])
def test_two_chunks_of_a_rank_share_as_shared_layers_do(schedule: str) -> None:
    local, shared = (
        train(
            *(entries(kind), 2, schedule),
            steps=3,
            data=MODELS["gpt"].batch,
            optimizer=adam,
            loss_fn=models.loss,
        )
        for kind in (LocalSharedLayerDesc, SharedLayerDesc)
    )
    assert local.losses == shared.losses
    assert [*local.state.values()] == [*shared.state.values()]


@pytest.mark.parametrize(
    ("layers", "ranks", "schedule", "names"),
    [
        (entries(), 1, "1F1B", ()),
        (entries(), 2, "DualPipeV", (TIED,)),
        *((WITH_HEAD, 2, schedule, models.SHARED) for schedule in ("1F1B", "ZBV")),
    ],
)
def test_only_the_order_in_which_uses_are_added_differs_from_the_single_model(
    layers: list[Any], ranks: int, schedule: str, names: tuple[str, ...]
) -> None:
    with model_in_job(ranks, 4, schedule, layers=layers, loss_fn=models.loss) as pipe:
        session = parity.begin(pipe, adam(pipe, epsilon=1e-4))
        session.step(MODELS["gpt"].batch(4, 0))
        first = [*session.report.differences]
        session.step(MODELS["gpt"].batch(4, 1))
    assert session.report.passed, session.report.verdict()
    assert session.report.tolerance == (1e-5 if names else 0.0)
    assert {found.name for found in first} <= ({"", *names} if names else set())
    assert {"loss", "output"}.isdisjoint(found.quantity for found in first)


def test_entries_of_one_class_are_layers_of_their_own() -> None:
    one, two = (LocalSharedLayerDesc("head", Head, None, "rows") for _ in range(2))
    with pytest.raises(ConfigError, match=r"the weights \['rows'\][\s\S]*take the weights"):
        PipelineLayer([one, two], num_stages=1)
    one, two = (LocalSharedLayerDesc("head", Head, None, "embedding_weight") for _ in range(2))
    first, second = PipelineLayer([one, nn.functional.relu, two], num_stages=1).run_function[::2]
    assert first.rows is second.rows
    assert first.bias is not second.bias


def test_a_forward_func_is_called_with_its_own_layer() -> None:
    def doubled(layer: Any, x: Any) -> Any:
        return layer(x) * 2

    whole = entries()
    whole[-1] = LocalSharedLayerDesc("embed", Head, doubled, "embedding_weight")
    ids, _ = MODELS["gpt"].batch(1, 0)
    plain, twice = (PipelineLayer(e, num_stages=1)(ids) for e in (entries(), whole))
    assert (plain * 2).numpy().tobytes() == twice.numpy().tobytes()


class Forgetful(Head):
    """Takes the weight and does nothing with it."""

    def __init__(self, embedding_weight: Any = None) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("layers", "schedule", "message"),
    [
        (entries(), "1F1B", r"within one rank[\s\S]*layers 0 and 3[\s\S]*'embed'[\s\S]*0 and 1"),
        (entries(last=Forgetful), "DualPipeV", r"does not keep[\s\S]*\['embedding_weight'\]"),
        (entries(last=FeedForward), "DualPipeV", r"unexpected keyword[\s\S]*use SharedLayerDesc"),
        (
            [LocalSharedLayerDesc("k", nn.Linear, None, "table", 2, 2)] * 2,
            "1F1B",
            "no parameter 'table'",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_by_its_place(
    layers: list[Any], schedule: str, message: str
) -> None:
    with job(2, 4, schedule), pytest.raises(ConfigError, match=re.compile(message)):
        pipeline(layers, loss_fn=models.loss)


def test_a_copy_has_names_attributes_hooks_and_modes() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1D(3), nn.Linear(3, 2))
    weight, bias = layer[0].weight, layer[2].bias
    weight.lr_group, weight.is_firstly_shared, bias.need_clip = "slow", False, False
    layer[2].register_forward_post_hook(lambda *values: values[-1] * 2)
    layer[1].eval()
    layer[0].scale = [1, 2]
    other = copy_layers([layer, paddle.tanh], [layer, paddle.tanh], [weight])[0]
    assert [p.name for p in other.parameters()] == [p.name for p in layer.parameters()]
    assert (other[0].weight.lr_group, other[2].bias.need_clip) == ("slow", False)
    # What a rank says of its own copy of a tied weight is not true of another.
    assert not hasattr(other[0].weight, "is_firstly_shared")
    assert [part.training for part in other] == [True, False, True]
    x = paddle.randn([4, 3])
    assert (other(x) == layer(x)).all()
    assert (other[0].scale, other[0].scale is layer[0].scale) == ([1, 2], False)
    assert shares_memory(other[0].weight, weight)
    assert not shares_memory(other[2].bias, bias)


class CopiesItself(nn.Layer):
    """Is copied by a method of its own, which knows no memo."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        other = CopiesItself()
        other.set_state_dict(self.state_dict())
        return other


def test_a_layer_that_copies_itself_keeps_names_too() -> None:
    layer = CopiesItself()
    other = copy_layers(layer, [layer])
    assert [p.name for p in other.parameters()] == [p.name for p in layer.parameters()]
    assert (other.linear.weight == layer.linear.weight).all()
