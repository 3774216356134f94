"""What may cross is taken apart; what may not is named by its place in the value."""

from __future__ import annotations

import collections
import enum
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe.transport.wire.message import MessageKey, Route
from fleetpipe.transport.wire.structure import DEEPEST, Structure
from fleetpipe.transport.wire.value import MOST_PARTS, Unfit, take_apart
from tests.transport.helpers import same


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


def refusal(value: Any) -> str:
    with pytest.raises(Unfit) as raised:
        take_apart(value)
    return str(raised.value.error(Route(MessageKey("F", 0, 1, "", 3), 0, 1)))


def test_a_value_is_its_structure_and_its_tensors() -> None:
    x, y = paddle.ones([2, 3]), paddle.zeros([], "int64")
    y.stop_gradient = False
    value = {"b": [x, None, (True, 1, 2.5)], "a": y, "text": "t", "empty": ()}
    tree, tensors = take_apart(value)
    assert tree == (
        "dict",
        ("b", ("list", ("tensor", "float32", (2, 3), True), ("none",),
               ("tuple", ("bool", True), ("int", "0x1"), ("float", "2.5")))),
        ("a", ("tensor", "int64", (), y.stop_gradient)),
        ("text", ("str", "t")),
        ("empty", ("tuple",)),
    )  # fmt: skip
    assert [id(tensor) for tensor in tensors] == [id(x), id(y)]
    assert same(Structure(tree).rebuild(tensors), value)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([], ()), ("1", 1)])
def test_structures_tell_equal_values_of_different_types_apart(one: Any, other: Any) -> None:
    assert take_apart(one)[0] != take_apart(other)[0]


def test_structures_of_nan_are_equal() -> None:
    assert take_apart(float("nan"))[0] == take_apart(float("nan"))[0]


@pytest.mark.parametrize(
    ("value", "place", "got"),
    [
        ({"mask": [np.zeros(2)]}, "value['mask'][0]", "numpy.ndarray"),
        ((1, {1, 2}), "value[1]", "of type set"),
        ([np.float64(1)], "value[0]", "numpy.float64"),
        ({"a": {3: 1}}, "value['a']", "the key 3 of type int"),
        (object(), "value cannot", "of type object"),
        ([Colour.RED], "value[0]", "Colour"),
        (Pair(1, 2), "value cannot", "Pair"),
        (collections.OrderedDict(), "value cannot", "collections.OrderedDict"),
        ([b"bytes"], "value[0]", "bytes"),
        (print, "value cannot", "builtin_function_or_method"),
    ],
)
def test_what_may_not_cross_is_named(value: Any, place: str, got: str) -> None:
    message = refusal(value)
    assert place in message
    assert got in message
    assert "a dense Tensor of any dtype" in message
    assert "F of edge 0>1, micro-batch 3 from rank 0 to rank 1" in message


def test_a_sparse_tensor_may_not_cross() -> None:
    sparse = paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [2])
    assert "value['x'] cannot" in refusal({"x": sparse})
    assert "not dense" in refusal({"x": sparse})


def test_a_tensor_without_data_may_not_cross() -> None:
    for clear in (paddle.Tensor._clear_dataptr, paddle.Tensor._clear_data):
        freed = paddle.ones([4]) * 2
        clear(freed)
        assert "freed" in refusal([freed])


def test_a_parameter_may_cross() -> None:
    parameter = paddle.nn.Linear(2, 3).weight
    assert take_apart(parameter)[0] == ("tensor", "float32", (2, 3), False)


def test_a_value_within_itself_is_refused() -> None:
    cycle = {}
    cycle["again"] = [cycle]
    message = refusal(cycle)
    assert "value['again'][0]['again']" in message
    assert f"more than {DEEPEST} deep" in message


def test_the_deepest_value_that_may_cross() -> None:
    value = 1
    for _ in range(DEEPEST):
        value = [value]
    take_apart(value)
    assert "deep" in refusal([value])


def test_a_value_of_too_many_parts_is_refused() -> None:
    doubled = [None]
    for _ in range(40):
        doubled = [doubled, doubled]
    assert f"more than {MOST_PARTS} parts" in refusal(doubled)
