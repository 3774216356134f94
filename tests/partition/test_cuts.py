"""Fleet's three ways to cut: golden values, what is refused, and properties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import PartitionError
from fleetpipe.partition import by_class, explicit, uniform


@pytest.mark.parametrize(
    ("count", "parts", "boundaries"),
    [
        (10, 4, [0, 2, 4, 7, 10]),
        (15, 2, [0, 7, 15]),
        (7, 3, [0, 2, 4, 7]),
        (3, 3, [0, 1, 2, 3]),
        (5, 1, [0, 5]),
    ],
)
def test_uniform_gives_the_remainder_to_the_last_stages(
    count: int, parts: int, boundaries: list[int]
) -> None:
    assert uniform(count, parts) == boundaries


@given(st.integers(1, 30), st.integers(0, 60))
def test_uniform_stages_differ_by_one_layer_and_never_shrink(parts: int, more: int) -> None:
    boundaries = uniform(parts + more, parts)
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    assert sum(lengths) == parts + more
    assert lengths == sorted(lengths)
    assert lengths[-1] - lengths[0] <= 1


@pytest.mark.parametrize(
    ("names", "parts", "regex", "boundaries"),
    [
        ("E B B B B H", 2, "B", [0, 3, 6]),  # before the first match: stage 0; after the last: end
        ("B relu B relu", 2, "B", [0, 1, 4]),  # unmatched after a boundary: the next stage
        ("Block Linear BLOCK", 2, "block", [0, 1, 3]),  # whatever the case
        ("TransformerBlock X SubBlockB", 2, "Block", [0, 1, 3]),  # anywhere in the name
        ("A B A B", 4, "A|B", [0, 1, 2, 3, 4]),
        ("A B A B", 2, "(?:A|B)", [0, 2, 4]),  # a colon of the expression's own
    ],
)
def test_by_class_cuts_right_after_matches(
    names: str, parts: int, regex: str, boundaries: list[int]
) -> None:
    assert by_class(names.split(), parts, regex) == boundaries


def test_by_class_never_matches_a_layer_without_a_name() -> None:
    assert by_class(["", "", "Block", "Block"], 2, ".*") == [0, 3, 4]


def test_explicit_takes_the_end_or_adds_it() -> None:
    assert explicit(10, 3, [0, 3, 7]) == [0, 3, 7, 10]
    assert explicit(10, 3, (0, 3, 7, 10)) == [0, 3, 7, 10]


def test_explicit_leaves_the_callers_list_alone() -> None:
    bounds = [0, 3]
    explicit(10, 2, bounds)
    assert bounds == [0, 3]


@pytest.mark.parametrize(
    ("bounds", "parts", "words"),
    [
        ([1, 5], 2, ["layers before layer 1", "begin the list with 0"]),
        ([0, 7, 3], 3, ["stage 1 would end before it begins", "[0, 7, 3, 10]"]),
        ([0, 7, 7], 3, ["stage 1 would be empty", "list [0, 7, 7]"]),
        ([0, 5, 9], 2, ["end at layer 9, the model at layer 10", "end the list with 10"]),
        ([0, 5, 10], 3, ["stage 2 would be empty"]),
        ([0, 5, 12], 2, ["end at layer 12, the model at layer 10"]),
        ([0, -2], 2, ["stage 0 would end before it begins"]),
        ([0], 2, ["wrong length", "2 numbers", "got: 1 numbers"]),
        ([0, 1, 2, 3], 2, ["wrong length", "got: 4 numbers"]),
        ([0, 5.0], 2, ["not a layer number", "5.0 of type float"]),
        ([0, True], 2, ["not a layer number", "True of type bool"]),
        ([0, "5"], 2, ["not a layer number", "'5' of type str"]),
    ],
)
def test_explicit_refuses_by_name(bounds: list[int], parts: int, words: Sequence[str]) -> None:
    with pytest.raises(PartitionError) as caught:
        explicit(10, parts, bounds)
    for word in words:
        assert word in str(caught.value)


def test_more_stages_than_layers_names_the_empty_stage() -> None:
    with pytest.raises(PartitionError, match=r"stage 0 would be empty: 3 layers cannot fill 4"):
        uniform(3, 4)
    with pytest.raises(PartitionError, match=r"stage 3 would be empty"):
        explicit(3, 4, [0, 1, 2, 3])


def test_no_stages_are_refused() -> None:
    with pytest.raises(PartitionError, match="at least 1"):
        uniform(3, 0)


def test_by_class_says_both_counts_when_they_do_not_divide() -> None:
    with pytest.raises(PartitionError) as caught:
        by_class(["Block"] * 7, 3, "Block")
    assert "the 7 layers" in str(caught.value)
    assert "divisible by the 3 stages" in str(caught.value)


def test_by_class_lists_the_names_when_nothing_matches() -> None:
    with pytest.raises(PartitionError, match=r"names \(none\), Linear, ReLU"):
        by_class(["Linear", "ReLU", "Linear", ""], 2, "Conv")


def test_by_class_says_what_is_wrong_with_an_expression() -> None:
    with pytest.raises(PartitionError, match="unterminated subpattern"):
        by_class(["Linear", "ReLU"], 2, "(")
