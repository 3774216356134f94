"""Values that cross between stages: what they hold and where, and values like them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import paddle
import pytest

from fleetpipe.dygraph.nest import join, leaves, map_tensors, tensors_of


class Pair(NamedTuple):
    left: Any
    right: Any


def test_leaves_come_in_order_with_the_way_to_each() -> None:
    found = list(leaves({"a": (1, [2, None]), "b": Pair("x", ())}))
    assert found == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1), None), (("b", 0), "x")]


def test_a_derived_container_is_a_leaf_where_classes_are_exact() -> None:
    pair, ordered = Pair(1, 2), OrderedDict(a=3)
    assert [leaf for _, leaf in leaves([pair, ordered])] == [1, 2, 3]
    assert [leaf for _, leaf in leaves([pair, ordered], exact=True)] == [pair, ordered]


def test_a_value_like_another_keeps_its_containers_and_what_is_no_tensor() -> None:
    tensor = paddle.zeros([2])
    value = (Pair(tensor, "x"), [{"k": tensor}, ()])
    like = map_tensors(lambda one: one + 1, value)
    assert type(like[0]) is Pair
    assert like[0].right == "x"
    assert [one.tolist() for one in tensors_of(like)] == [[1, 1], [1, 1]]
    assert like[1][1] == ()


@pytest.mark.parametrize(
    "values", [[(1, 2), (1,)], [(1,), [1]], [{"a": 1}, {"b": 1}], [Pair(1, 2), (1, 2)], [1, 2]]
)
def test_what_is_not_alike_is_joined_as_it_is(values: list[Any]) -> None:
    seen: list[Any] = []
    join(seen.append, [{"k": value} for value in values])
    assert seen == [values]
