"""A sample of ``paddle.vision.models``: skips, dense links, shuffles, gates, dropouts."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("name", SAMPLE)
def test_a_vision_model_has_the_bits_of_the_plain_one(name: str) -> None:
    spec = SAMPLE[name]
    done = compared(name, len(spec) + 1, steps=1, split_spec=spec, verify=False)
    assert done.differing == []
