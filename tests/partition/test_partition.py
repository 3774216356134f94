"""Cuts of layers into stages: the balanced one, Fleet's three ways, seg_method, and the result."""

from __future__ import annotations

import doctest
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetpipe.partition
from fleetpipe.errors import PartitionError
from fleetpipe.partition import (
    SLACK,
    LayerInfo,
    Partition,
    balanced,
    by_class,
    explicit,
    fastest,
    segment,
    uniform,
)
from tests.launching import ROOT

pytestmark = pytest.mark.no_paddle


def loads(weights: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    return [sum(weights[start:end]) for start, end in itertools.pairwise(boundaries)]


def all_cuts(count: int, parts: int) -> Iterator[list[int]]:
    for inner in combinations(range(1, count), parts - 1):
        yield [0, *inner, count]


def best_of_all(weights: Sequence[int], parts: int) -> list[int]:
    """The documented rule, said directly: heaviest stage, then squares, then the latest cuts."""

    def rank(boundaries: list[int]) -> tuple[int, int, list[int]]:
        stages = loads(weights, boundaries)
        return max(stages), sum(load**2 for load in stages), [-cut for cut in boundaries[::-1]]

    return min(all_cuts(len(weights), parts), key=rank)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    parts = draw(st.integers(1, 4))
    # Sums of the largest are not exact as floats.
    weight = st.one_of(st.just(0), st.integers(0, 8), st.integers(2**60, 2**60 + 3))
    return draw(st.lists(weight, min_size=parts, max_size=12)), parts


@given(problems())
def test_is_the_best_of_all_cuts(problem: tuple[list[int], int]) -> None:
    weights, parts = problem
    assert balanced(weights, parts) == best_of_all(weights, parts)


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=9),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
    st.integers(1, 4),
    st.data(),
)
def test_no_other_cut_has_a_faster_slowest_stage(
    weights: list[int], entering: list[int], parts: int, data: st.DataObject
) -> None:
    """A stage costs its layers, and what enters it; one cannot be longer than five layers."""
    count = len(weights)
    places = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=parts - 1)))

    def cost(stage: int, start: int, end: int) -> float:
        return math.inf if end - start > 5 else sum(weights[start:end]) + stage * entering[start]

    def costs(inner: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *inner, count)
        stages = [cost(s, *pair) for s, pair in enumerate(itertools.pairwise(bounds))]
        return max(stages), sum(one**2 for one in stages)

    every = [costs(inner) for inner in itertools.combinations(places, parts - 1)]
    best = min(every)
    if math.isinf(best[0]):
        with pytest.raises(PartitionError, match="fit into memory"):
            fastest(places, count, parts, cost)
        return
    found = fastest(places, count, parts, cost)
    assert found.cost == best[0]
    assert costs(found.boundaries[1:-1]) == best
    assert found == fastest(places, count, parts, cost, lambda *pair: sum(weights[slice(*pair)]))


@given(st.lists(st.integers(0, 9), min_size=3, max_size=12), st.integers(1, 3))
def test_sums_alone_give_the_balanced_cut(weights: list[int], parts: int) -> None:
    places = range(1, len(weights))
    found = fastest(places, len(weights), parts, lambda _, start, end: sum(weights[start:end]))
    assert list(found.boundaries) == balanced(weights, parts)


@given(
    st.lists(st.integers(1, 99), min_size=4, max_size=9),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
    st.integers(1, 4),
)
def test_of_cuts_that_are_nearly_as_fast_it_is_the_one_that_sends_least(
    weights: list[int], sizes: list[int], parts: int
) -> None:
    count = len(weights)

    def cost(_: int, start: int, end: int) -> float:
        return sum(weights[start:end])

    def sent(start: int) -> int:
        return sizes[start] if start else 0

    every: dict[tuple[int, ...], float] = {}
    for inner in itertools.combinations(range(1, count), parts - 1):
        bounds = (0, *inner, count)
        every[bounds] = max(cost(0, *pair) for pair in itertools.pairwise(bounds))
    most = (1 + SLACK) * min(every.values())
    near = [bounds for bounds, slowest in every.items() if slowest <= most]
    found = fastest(range(1, count), count, parts, cost, sent=sent)
    assert found.cost == every[found.boundaries] <= most
    # Of these the latest, the last border first.
    assert found.boundaries == min(
        near, key=lambda b: (sum(map(sent, b[:-1])), [-x for x in b[::-1]])
    )
    floored = fastest(range(1, count), count, parts, cost, lambda *pair: cost(0, *pair), sent)
    assert floored == found


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
    bounds = [0, 3, 7]
    assert explicit(10, 3, bounds) == [0, 3, 7, 10]
    assert explicit(10, 3, (0, 3, 7, 10)) == [0, 3, 7, 10]
    assert bounds == [0, 3, 7]


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


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: balanced([1, 2], 3), "stage 2 would be empty(.|\n)*'balanced'"),
        (lambda: balanced([1, -2], 1), "layer 1"),
        (lambda: uniform(3, 4), "stage 0 would be empty: 3 layers cannot fill 4"),
        (lambda: uniform(3, 0), "at least 1"),
        (lambda: explicit(3, 4, [0, 1, 2, 3]), "stage 3 would be empty"),
        (lambda: fastest([2], 5, 4, lambda *_: 1.0), "4 stages need 3 places"),
        (
            lambda: by_class(["Block"] * 7, 3, "Block"),
            "the 7 layers(.|\n)*divisible by the 3 stages",
        ),
        (
            lambda: by_class(["Linear", "ReLU", "Linear", ""], 2, "Conv"),
            r"names \(none\), Linear, ReLU",
        ),
        (lambda: by_class(["Linear", "ReLU"], 2, "("), "unterminated subpattern"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused(cut: Callable[[], object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        cut()


LAYERS = (
    LayerInfo("Embedding", 1000),
    *[LayerInfo("Block", 300)] * 3,
    LayerInfo("", 0),
    LayerInfo("Linear", 100),
)


def test_stages_hold_every_layer_once_and_in_order() -> None:
    partition = Partition((0, 2, 5, 6), "uniform", LAYERS)
    assert [layer for stage in partition.stages for layer in stage.layers] == list(LAYERS)
    assert [(s.stage, s.start, s.end) for s in partition.stages] == [
        (0, 0, 2),
        (1, 2, 5),
        (2, 5, 6),
    ]
    assert [stage.parameters for stage in partition.stages] == [1300, 600, 100]
    assert [partition.stage_of(layer) for layer in range(6)] == [0, 0, 1, 1, 1, 2]
    for layer in (-1, 6):
        with pytest.raises(PartitionError, match=f"no layer {layer}"):
            partition.stage_of(layer)


@pytest.mark.parametrize("boundaries", [(0, 5), (1, 6), (0, 3, 3, 6), (0, 4, 2, 6), (0, 7), (0,)])
def test_a_partition_that_loses_a_layer_cannot_be_made(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError):
        Partition(boundaries, "uniform", LAYERS)


def test_table() -> None:
    assert Partition((0, 2, 5, 6), "uniform", LAYERS).table() == "\n".join(
        [
            "seg_method uniform: 6 layers, stages: 3",
            "stage  layers  names             parameters  share",
            "    0     0-1  Embedding, Block       1,300  65.0%",
            "    1     2-4  Block x2, (none)         600  30.0%",
            "    2       5  Linear                   100   5.0%",
            "  all       6                         2,000",
        ]
    )


def test_table_with_the_ranks_of_a_placement() -> None:
    table = Partition((0, 2, 5, 6), "uniform", LAYERS).table(lambda stage: (0, 1, 0)[stage])
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["stage", "rank", "layers"],
        ["0", "0", "0-1"],
        ["1", "1", "2-4"],
        ["2", "0", "5"],
        ["all", "6", "2,000"],
    ]


def test_table_shortens_many_names_and_needs_no_parameters() -> None:
    layers = tuple(LayerInfo(f"Layer{number}") for number in range(30))
    row = Partition((0, 30), "uniform", layers).table().splitlines()[2]
    assert row.endswith("...           0      -")
    assert len(row) < 80


CONVOLUTION = [LayerInfo("Conv2D", 80), LayerInfo("ReLU"), LayerInfo("Linear", 330)]


@pytest.mark.parametrize(
    ("method", "boundaries"),
    [
        ("uniform", (0, 1, 3)),
        ("layer:conv2d|relu", (0, 1, 3)),
        ("balanced", (0, 2, 3)),
        ("parameters", (0, 2, 3)),
        ("type:conv2d|relu", (0, 1, 3)),
        ([0, 2], (0, 2, 3)),
        ((0, 2, 3), (0, 2, 3)),
    ],
)
def test_method_chooses_the_cut(method: str | list[int], boundaries: tuple[int, ...]) -> None:
    partition = segment(CONVOLUTION, 2, method)
    assert partition.boundaries == boundaries
    assert partition.layers == tuple(CONVOLUTION)
    assert partition.method == (method if isinstance(method, str) else f"list {[*method]}")


@pytest.mark.parametrize(
    ("method", "hint"),
    [("ballanced", "'balanced'"), ("layer", "'layer:Regex'"), ("Uniform", "'uniform'")],
)
def test_unknown_method_is_refused_with_the_nearest(method: str, hint: str) -> None:
    with pytest.raises(PartitionError, match="unknown seg_method") as caught:
        segment(CONVOLUTION, 2, method)
    assert f"did you mean {hint}" in str(caught.value)


def test_example_of_the_docstring() -> None:
    assert doctest.testmod(fleetpipe.partition).failed == 0


Oracle = Callable[[list[LayerInfo], int, object], list[int]]


@pytest.fixture(scope="module")
def fleet_cut() -> Oracle:
    """Cuts with Paddle's SegmentLayers; an object named like the layer stands for each layer."""
    pytest.importorskip("paddle")
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SegmentLayers

    def cut(layers: list[LayerInfo], parts: int, method: object) -> list[int]:
        items = [named(layer.name) if layer.name else object() for layer in layers]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            boundaries: list[int] = SegmentLayers(items, parts, method).do_segment()
        return boundaries

    return cut


def named(name: str) -> Callable[[], None]:
    def function() -> None:
        pass

    function.__name__ = name
    return function


names = st.sampled_from(["Block", "blockB", "Linear", "ReLU", "SubBlock", ""])


@given(st.lists(names, min_size=1, max_size=40), st.integers(1, 8), st.data())
def test_cuts_as_fleet_does_where_fleet_cuts(
    fleet_cut: Oracle, layer_names: list[str], parts: int, data: st.DataObject
) -> None:
    layers = [LayerInfo(name) for name in layer_names]
    inner = st.sets(st.integers(1, len(layers)), min_size=parts - 1, max_size=parts - 1)
    lists = inner.map(lambda cuts: [0, *sorted(cuts)]) if parts <= len(layers) else st.nothing()
    ended = lists.map(lambda bounds: [*bounds, len(layers)])
    methods = st.sampled_from(["uniform", "layer:Block", "layer:^block", "layer:Linear|relu$"])
    method = data.draw(methods | lists | ended)
    try:
        expected = fleet_cut(layers, parts, method)
    except AssertionError:
        expected = None
    if expected is None or len(set(expected)) <= parts:  # Fleet cuts, but a stage is empty
        with pytest.raises(PartitionError):
            segment(layers, parts, method)
    else:
        assert list(segment(layers, parts, method).boundaries) == expected


def test_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "partition.md").read_text()
    (code, table), (refused, message) = (
        re.search(rf"```python\n({start}.*?)```.*?```text\n(.*?)```", page, re.DOTALL).groups()
        for start in ("from", "segment")
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out == table
    with pytest.raises(PartitionError) as caught:
        exec(refused, names)
    assert message == f"fleetpipe.errors.PartitionError: {caught.value}\n"
