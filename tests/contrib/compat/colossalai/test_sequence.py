"""exec_seq: what each entry means, and what is refused."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat.colossalai.pipeline.sequence import LayerCall, read
from fleetpipe.errors import ConfigError


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.blocks = nn.LayerList([nn.Linear(3, 3), nn.Tanh()])
        self.tail = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        self.again = self.head


def double(x: Any) -> Any:
    return x * 2


def halve(x: Any) -> Any:
    return x / 2


ALL = ["head", "blocks.0", "blocks.1", "tail"]


def test_without_a_sequence_children_stand_as_they_were_made_and_containers_are_opened() -> None:
    found = read(Model(), None)
    assert [step.name for step in found.steps] == [
        *("head", "blocks.0", "blocks.1", "tail.0", "tail.1")
    ]


def test_functions_stand_around_the_layers_beside_them() -> None:
    steps = read(
        Model(),
        [double, "head", halve, (double, "behind"), (halve, "front"), (double, "front"), *ALL[1:]],
    ).steps
    assert steps[0].call.front == (double,)
    assert steps[0].call.behind == (halve, double)
    assert steps[1].call.front == (halve, double)
    assert steps[1].call.behind == ()


def test_a_second_name_of_a_layer_is_known() -> None:
    model = Model()
    steps = read(model, [*ALL, "again"]).steps
    assert steps[-1].layer is model.head


def test_marks_say_how_many_layers_stand_before_them() -> None:
    found = read(Model(), ["head", "SPLIT_NODE", double, *ALL[1:3], "SPLIT_NODE", "tail"])
    assert found.splits == (1, 3)
    assert found.steps[0].call.behind == (double,)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["haed", *ALL[1:]], "did you mean 'head'"),
        ([*ALL, (double, "front")], "ends with a function that stands in front of nothing: double"),
        ([(double, "behind"), *ALL], "begins with a function that stands behind nothing"),
        (["head", "blocks", "tail"], "'blocks', which cannot be called"),
        (["head", "tail"], "nothing for blocks.0"),
        ([*ALL, 3], "neither the name of a sublayer nor a function"),
        ([*ALL, (double, "after")], "neither the name of a sublayer nor a function"),
        ([*ALL, nn.ReLU], "neither the name of a sublayer nor a function"),
        ([*ALL, nn.Linear(2, 2)], "a layer with parameters"),
        ([double], "ends with a function"),
        ([], "names no layer"),
    ],
)
def test_what_cannot_stand_in_a_sequence_is_refused(entries: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Model(), entries)
    assert words in str(caught.value).replace("\n  got", "")


def test_a_layer_without_parameters_may_stand_as_a_function() -> None:
    flatten = nn.Flatten()
    assert read(Model(), [*ALL, flatten]).steps[-1].call.behind == (flatten,)


def test_a_parameter_of_the_model_itself_is_missed() -> None:
    model = Model()
    model.scale = paddle.create_parameter([1], "float32")
    with pytest.raises(ConfigError, match="nothing for scale"):
        read(model, ALL)


def test_functions_on_both_sides_of_a_layer_run_and_a_tuple_is_several_arguments() -> None:
    call = LayerCall((lambda x, y: x + y,), (lambda x: (x * 10, x), lambda x, y: x + y))
    assert float(call(nn.Identity(), (paddle.ones([]), paddle.ones([])))) == 22
