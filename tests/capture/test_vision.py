"""A sample of ``paddle.vision.models``, and a ResNet that is cut anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from paddle.vision.models import resnet18

from fleetpipe import SplitPoint
from tests.capture.beside import CLASSES, images, require_bits
from tests.capture.vision import compared

#: By name, the stages and where they begin; ``make test-models`` cuts all of them by cost.
SAMPLE = {
    "shufflenet_v2_x0_25": ["3_3", "4_2"],
    "mobilenet_v3_small": ["blocks.5"],
    "squeezenet1_1": ["_conv5"],
    "densenet121": ["batch_norm"],
    "resnext50_32x4d": ["layer3"],
    "LeNet": ["fc"],
}


@pytest.mark.once_for("densenet121", "resnext50")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_vision_model_has_the_bits_of_the_plain_one(name: str) -> None:
    spec = SAMPLE[name]
    done = compared(name, len(spec) + 1, steps=1, split_spec=spec, verify=False)
    assert done.differing == []


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
    done = require_bits(lambda: resnet18(num_classes=CLASSES), images(8), split_spec, verify=False)
    assert done.pipe.segment_parts == [0, start + 1, 71]
