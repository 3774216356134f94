"""Which entries are one layer, which weights they share, and what is refused before any wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet import meta_parallel as stock

from fleetpipe.dygraph.layers.entries import Blueprints, build_without_memory
from fleetpipe.dygraph.layers.tied import find_shared_layers
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.dygraph import models
from tests.dygraph.models import MODELS, WIDTH
from tests.pipelines import job, model_in_job, pipeline, sgd

IS_LIST = hasattr(stock, "LocalSharedLayerDesc")


class Pair(nn.Layer):
    """Two weights."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.one, self.two = (self.create_parameter([rows, 4]) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return x @ self.one @ self.two


class Settings:
    """Arguments that equal nothing but themselves, as Paddle's ParamAttr."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Configured(nn.Layer):
    """A layer with any arguments."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        super().__init__()
        self.weight = self.create_parameter([2, 2])

    def forward(self, x: Any) -> Any:
        return x @ self.weight


def found(entries: list[Any]) -> Any:
    return find_shared_layers(entries, Blueprints(entries))


def shared(*inputs: Any, **named: Any) -> Any:
    return SharedLayerDesc("k", Configured, None, "weight", *inputs, **named)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((), (), True),
        ((1, "a", None), (1, "a", None), True),
        ((1,), (2,), False),
        ((1,), (1.0,), False),
        (([1, {"a": 2}],), ([1, {"a": 2}],), True),
        (([1, {"a": 2}],), ([1, {"a": 3}],), False),
        ((np.arange(3),), (np.arange(3),), True),
        ((np.arange(3),), (np.arange(4),), False),
        ((Settings(1),), (Settings(1),), True),
        ((Settings(1),), (Settings(Settings(2)),), False),
        ((nn.Linear,), (nn.ReLU,), False),
        ((nn.initializer.Normal(0, 1),), (nn.initializer.Normal(0, 1),), True),
        ((nn.initializer.Normal(0, 1),), (nn.initializer.Normal(0, 2),), False),
        (
            (paddle.ParamAttr(initializer=nn.initializer.Constant(1.0)),),
            (paddle.ParamAttr(initializer=nn.initializer.Constant(1.0)),),
            True,
        ),
    ],
)
def test_the_same_arguments_make_one_layer(one: Any, other: Any, same: bool) -> None:
    layers = found([shared(*one), nn.functional.relu, shared(*other)])
    assert [layer.indices for layer in layers] == ([(0, 2)] if same else [(0,), (2,)])
    names = {name for layer in layers for name in layer.names.values()}
    # Either way there is one weight.
    assert names == {"shared_layers.k.weight"}


def test_another_class_shares_what_is_named_and_nothing_else() -> None:
    entries = [
        models.tied(),
        LayerDesc(nn.LayerNorm, WIDTH),
        SharedLayerDesc("embed", models.Head, None, "embedding_weight"),
    ]
    with job(2):
        layers = pipeline(entries, loss_fn=models.loss).layers
        embed, _, head = layers.run_function
        assert isinstance(head, models.Head)
        assert head.table is embed.embedding_weight
        assert list(layers.state_dict())[:2] == [
            "shared_layers.embed.scale",
            "shared_layers.embed.table.weight",
        ]
        slots = [slot.name for slot in layers.state.slots()]
        assert slots.count("shared_layers.embed.table.weight") == 1
        assert "2.projection.weight" in slots
        assert "2.table" not in slots
        assert list(layers.full_state_dict()) == slots
        single = layers.single_model()
        layers.copy_to(single)
        ids, _ = MODELS["gpt"].batch(4, 0)
        assert layers(ids).numpy().tobytes() == single(ids).numpy().tobytes()


@pytest.mark.skipif(not IS_LIST, reason="2.6.2 shares one attribute")
def test_several_attributes_and_a_part_of_them() -> None:
    entries = [
        SharedLayerDesc("k", Pair, None, ["one", "two"]),
        SharedLayerDesc("k", Pair, None, ["two"], rows=4),
    ]
    first, second = found(entries)
    assert first.names == {"one": "shared_layers.k.one", "two": "shared_layers.k.two"}
    assert second.names == {"one": "1.one", "two": "shared_layers.k.two"}


class Body(nn.Layer):
    """A layer that gives its parameters by name, for one with a layer like it inside to share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    @property
    def weights(self) -> Any:
        return self.named_parameters()

    def forward(self, x: Any) -> Any:
        return self.norm(self.fc(x)).tanh()


class Deeper(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.out = nn.Linear(WIDTH, 3)

    @property
    def weights(self) -> Any:
        return self.body.weights

    def forward(self, x: Any) -> Any:
        return self.out(self.body(x))


@pytest.mark.parametrize("named", [{}, {"shared_submodule_weight_only": True}], ids=str)
def test_the_weights_of_a_sublayer_are_shared_by_name(named: dict[str, bool]) -> None:
    entries = [
        SharedLayerDesc("body", Body, None, "weights", **named),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        SharedLayerDesc("body", Deeper, None, "weights", **named),
    ]
    inputs, labels = paddle.randn([8, WIDTH]), paddle.randint(0, 3, [8, 1])
    with model_in_job(2, 4, layers=entries) as model:
        parameters = dict(model.layers.named_parameters())
        assert len(parameters) == 4 + 2 + 2
        body, middle, deeper = Body(), nn.Linear(WIDTH, WIDTH), Deeper()
        for path, name in [("fc", "fc"), ("norm", "norm")]:
            setattr(deeper.body, path, getattr(body, name))
        plain = nn.Sequential(body, middle, deeper)
        values = [value.numpy() for value in parameters.values()]
        for parameter, value in zip(plain.parameters(), values):
            parameter.set_value(value)
        loss = model.train_batch([inputs, labels], sgd(model))
        expected = nn.functional.cross_entropy(plain(inputs), labels)
        expected.backward()
        paddle.optimizer.SGD(0.1, parameters=plain.parameters()).step()
        assert abs(float(loss) - float(expected)) < 1e-6
        for ours, theirs in zip(parameters.values(), plain.parameters()):
            assert float((ours - theirs).abs().max()) < 1e-6


def test_the_pivot_may_stand_anywhere_and_shared_parameters_come_first() -> None:
    entries = [
        LayerDesc(nn.Linear, 6, 6),
        SharedLayerDesc("b", nn.Linear, None, "weight", 6, 6),
        SharedLayerDesc("a", nn.Linear, None, "weight", 6, 6),
        SharedLayerDesc("b", nn.Linear, None, "weight", 6, 6),
        LayerDesc(nn.Linear, 6, 4),
    ]
    with model_in_job(2, layers=entries) as model:
        assert [name for name, _ in model.named_parameters()] == [
            f"_layers.{path}.{kind}"
            for path in ("shared_layers.b", "shared_layers.a", "0", "4")
            for kind in ("weight", "bias")
        ]
        assert [slot.name for slot in model.layers.state.slots()][:3] == [
            "0.weight",
            "0.bias",
            "shared_layers.b.weight",
        ]
        assert model.layers.run_function[1] is model.layers.run_function[3]


def test_a_model_written_as_one_class_is_matched_in_the_order_of_the_list() -> None:
    class Whole(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))
            self.again = nn.Linear(6, 6)
            self.again.weight, self.again.bias = self.middle.weight, self.middle.bias

    entries = [
        LayerDesc(nn.Linear, 6, 6),
        SharedLayerDesc("k", nn.Linear, None, "weight", 6, 6),
        LayerDesc(nn.Linear, 6, 6),
        SharedLayerDesc("k", nn.Linear, None, "weight", 6, 6),
    ]
    layers = PipelineLayer(entries, num_stages=1)
    whole = Whole()
    layers.load_from(whole)
    own = layers.state_dict()
    pairs = [("0", whole.first), ("shared_layers.k", whole.middle), ("2", whole.last)]
    for name, layer in pairs:
        assert own[f"{name}.weight"].numpy().tobytes() == layer.weight.numpy().tobytes()
    names = layers.state.names_in(whole)
    assert names["again.weight"] == names["middle.weight"] == "shared_layers.k.weight"
    own["0.weight"].set_value(own["0.weight"] * 3)
    layers.copy_to(whole)
    assert whole.first.weight.numpy().tobytes() == own["0.weight"].numpy().tobytes()


def test_what_cannot_be_shared_is_refused_by_its_place() -> None:
    for entries, message in [
        ([SharedLayerDesc("k", Pair, None, "three")], "no parameter 'three'"),
        ([SharedLayerDesc("k", Pair, None, "training")], "no parameter 'training'"),
        (
            [SharedLayerDesc("k", Pair, None, "one"), SharedLayerDesc("k", Pair, None, "two")],
            "layers 0 and 1 of the list",
        ),
        (
            [
                SharedLayerDesc("body", nn.Linear, None, "weight", WIDTH, WIDTH),
                SharedLayerDesc("body", Deeper, None, ["weight", "weights"]),
            ],
            "its first entry does not",
        ),
        (
            [
                SharedLayerDesc("k", Pair, None, "one"),
                nn.functional.relu,
                SharedLayerDesc("k", Pair, None, "one", rows=5),
            ],
            r"layers 0 and 2 of the list[\s\S]*\[4, 4\][\s\S]*\[5, 4\]",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            PipelineLayer(entries, num_stages=1)


def test_a_layer_shared_by_hand_is_refused_across_ranks_only() -> None:
    layer = nn.Linear(6, 6)
    entries = [layer, nn.functional.tanh, layer, LayerDesc(nn.Linear, 6, 4)]
    with job(2):
        with pytest.raises(ConfigError, match=r"layers 0 and 2[\s\S]*SharedLayerDesc"):
            pipeline(entries)
        assert len(pipeline(entries, seg_method=[0, 3, 4]).parameters()) == 4
        single = pipeline(entries, seg_method=[0, 3, 4]).layers.single_model()
        assert len(single.parameters()) == 4


def test_blueprints_take_neither_names_nor_random_numbers() -> None:
    entries = [LayerDesc(nn.Linear, 2, 2)]
    with paddle.utils.unique_name.guard():
        paddle.seed(5)
        assert Blueprints(entries)[0].weight.shape == [2, 2]
        assert nn.Linear(2, 2).weight.name == "linear_0.w_0"
        after = paddle.rand([3])
    paddle.seed(5)
    nn.Linear(2, 2)
    assert after.numpy().tobytes() == paddle.rand([3]).numpy().tobytes()


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU])
def test_a_layer_of_another_rank_takes_the_names_that_it_has_there(kind: Any) -> None:
    """Paddle builds no LSTM without its memory: it is begun twice, under the same names."""

    def names(build: Callable[[], Any]) -> list[str]:
        with paddle.utils.unique_name.guard():
            return [p.name for layer in (build(), nn.Linear(2, 2)) for p in layer.parameters()]

    there = names(lambda: kind(2, 3))
    assert names(lambda: build_without_memory(LayerDesc(kind, 2, 3), 0, {})) == there


def test_a_description_may_have_a_blueprint_of_its_own() -> None:
    class Described(LayerDesc):  # type: ignore[misc]
        def blueprint(self) -> Any:
            return layer

    layer = nn.Linear(3, 4)
    assert Blueprints([Described(nn.Linear, 3, 4)])[0] is layer


def test_the_chunks_have_shared_layers_by_number_or_key() -> None:
    with job(2, 4, "ZBV"):
        layers = pipeline(models.layers(), loss_fn=models.loss).layers
        keys = [list(dict(chunk.named_children())) for chunk in layers.get_model_chunks()]
    assert keys[0][0] == "0"
    assert [key for chunk in keys for key in chunk].count("embed") == 2
