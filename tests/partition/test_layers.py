"""The partition as a value: it holds every layer once, and shows it."""

from __future__ import annotations

import pytest

from fleetpipe.errors import PartitionError
from fleetpipe.partition import LayerInfo, Partition

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


def test_stage_of_every_layer() -> None:
    partition = Partition((0, 2, 5, 6), "uniform", LAYERS)
    assert [partition.stage_of(layer) for layer in range(6)] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("layer", [-1, 6])
def test_stage_of_an_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(PartitionError, match=f"no layer {layer}"):
        Partition((0, 6), "uniform", LAYERS).stage_of(layer)


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
