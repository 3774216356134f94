"""exec_seq: what each entry means, and what is refused."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat.colossalai.pipeline.sequence import OUTPUT, RecordedCall, read
from fleetpipe.errors import BoundaryError, ConfigError


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
    assert steps[0].front == (double,)
    assert steps[0].behind == (halve, double)
    assert steps[1].front == (halve, double)
    assert steps[1].behind == ()


def test_a_second_name_of_a_layer_is_known() -> None:
    model = Model()
    steps = read(model, [*ALL, "again"]).steps
    assert steps[-1].layer is model.head


def test_marks_say_how_many_layers_stand_before_them() -> None:
    found = read(Model(), ["head", "SPLIT_NODE", double, *ALL[1:3], "SPLIT_NODE", "tail"])
    assert found.splits == (1, 3)
    assert found.steps[0].behind == (double,)


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
    assert read(Model(), [*ALL, flatten]).steps[-1].behind == (flatten,)


def test_a_parameter_of_the_model_itself_is_missed() -> None:
    model = Model()
    model.scale = paddle.create_parameter([1], "float32")
    with pytest.raises(ConfigError, match="nothing for scale"):
        read(model, ALL)


class Scaled(nn.Layer):
    def forward(self, x: Any, scale: Any = None, bias: Any = None) -> Any:
        return x if scale is None else x * scale + (0 if bias is None else bias)


def call(
    layer: Any, front: Any = (), behind: Any = (), first: bool = False, later: Any = ()
) -> Any:
    made = RecordedCall(layer, front, behind, first, frozenset(later))
    return lambda value: made(layer, value)


def number(value: Any) -> float:
    return float(value)


def of(value: float) -> Any:
    return paddle.to_tensor(value)


def test_functions_on_both_sides_of_a_layer_run() -> None:
    run = call(nn.Identity(), [lambda x: x + 1], [lambda x: x * 10, lambda x: x + 3])
    assert number(run(of(1.0))) == 23


def test_a_tuple_is_taken_apart() -> None:
    assert number(call(Scaled())((of(2.0), of(3.0)))) == 6
    # A layer or a function that takes less is given the first ones.
    assert number(call(nn.Identity())((of(2.0), of(3.0)))) == 2
    assert number(call(nn.Identity(), [lambda x, y: y])((of(2.0), of(3.0), of(4.0)))) == 3


def test_a_dict_gives_arguments_by_name_and_keeps_what_later_ones_ask_for() -> None:
    batch = {"x": of(2.0), "scale": of(3.0), "bias": of(1.0), "other": of(0.0)}
    found = call(Scaled(), first=True, later={"bias"})(batch)
    assert list(found) == [OUTPUT, "bias"]
    assert number(found[OUTPUT]) == 7
    assert list(batch) == ["x", "scale", "bias", "other"]
    # The next one is given the output by position, and the bias because it has an argument for it.
    assert number(call(Scaled())({OUTPUT: (of(2.0), of(5.0)), "bias": of(1.0)})) == 11


def test_a_function_changes_the_arguments_that_it_names() -> None:
    def change(bias: Any, scale: Any) -> Any:
        return bias + 1, scale * 2

    batch = {"scale": of(3.0), "x": of(2.0), "bias": of(1.0)}
    assert number(call(Scaled(), [change], first=True)(batch)) == 2 * 6 + 2


def test_a_dict_between_layers_is_a_value_like_any_other() -> None:
    value = {"x": of(2.0)}
    assert call(nn.Identity())(value) is value


def test_a_function_before_the_first_output_needs_a_name_of_the_batchs() -> None:
    with pytest.raises(BoundaryError, match="before the first output"):
        call(Scaled(), [lambda y: y], first=True)({"x": of(2.0)})
