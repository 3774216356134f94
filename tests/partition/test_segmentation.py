"""From seg_method to a partition, with Paddle's own SegmentLayers as the oracle."""

from __future__ import annotations

import doctest
import re
import warnings
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetpipe.partition.layers
from fleetpipe.errors import PartitionError
from fleetpipe.partition import LayerInfo, segment
from tests.launching import ROOT

LAYERS = [LayerInfo("Conv2D", 80), LayerInfo("ReLU"), LayerInfo("Linear", 330)]


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
    partition = segment(LAYERS, 2, method)
    assert partition.boundaries == boundaries
    assert partition.layers == tuple(LAYERS)


def test_partition_remembers_its_method() -> None:
    assert segment(LAYERS, 2).method == "uniform"
    assert segment(LAYERS, 2, [0, 2]).method == "list [0, 2]"


@pytest.mark.parametrize(
    ("method", "hint"),
    [("ballanced", "'balanced'"), ("layer", "'layer:Regex'"), ("Uniform", "'uniform'")],
)
def test_unknown_method_is_refused_with_the_nearest(method: str, hint: str) -> None:
    with pytest.raises(PartitionError, match="unknown seg_method") as caught:
        segment(LAYERS, 2, method)
    assert f"did you mean {hint}" in str(caught.value)


def test_example_of_the_docstring() -> None:
    assert doctest.testmod(fleetpipe.partition.layers).failed == 0


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
