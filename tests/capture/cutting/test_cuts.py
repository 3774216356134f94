"""A plain model that is cut where its user says gives the plain model's bits."""

from __future__ import annotations

from typing import Any

import pytest
from paddle.vision.models import resnet18

from fleetpipe import SplitPoint
from tests.capture.beside import CLASSES, images, trained
from tests.jobs import job

#: The first node of stage 1, by the cut: each basic block has 7 nodes, or 9 with a downsample.
CUTS: list[tuple[Any, int]] = [
    (["layer3"], 34),
    ({"layer3": SplitPoint.BEGINNING}, 34),
    ({"layer2.0": SplitPoint.END}, 27),
    # Within a block, whose input goes over the edge too, to the addition.
    ({"layer2.0.conv2": SplitPoint.END}, 22),
]


@pytest.mark.parametrize(("split_spec", "start"), CUTS, ids=str)
def test_an_unmodified_resnet_trains_to_the_same_bits(split_spec: Any, start: int) -> None:
    with job(pp=2):
        done = trained(
            lambda: resnet18(num_classes=CLASSES), images(8), split_spec=split_spec, verify=False
        )
    assert done.differing == []
    assert done.pipe.segment_parts == [0, start + 1, 71]
