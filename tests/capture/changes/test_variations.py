"""What a proof varies: every number stays one that a model may take."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.capture import variations
from fleetpipe.errors import StateError
from tests.capture.beside import require_bits
from tests.jobs import job

ALL = variations.ALL
BOXES = np.array([[[0, 0, 16, 16], [4, 4, 30, 30]], [[8, 2, 20, 31], [1, 5, 2, 7]]], "float32")
SHARES = np.array([[0.25, 0.75], [0.5, 0.5]], "float32")


@pytest.mark.parametrize("variation", ALL)
def test_boxes_stay_boxes(variation: variations.Variation) -> None:
    for boxes in (BOXES, BOXES - 9):
        got = variations.vary_numbers(boxes, variation, 2)
        assert (got[..., :2] <= got[..., 2:]).all()
        assert np.abs(got).max() <= np.abs(boxes).max()


@pytest.mark.parametrize("variation", ALL)
@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        *((np.array([0, 3, 3, 7]), 4), (np.array([9, 5]), 2)),
        *((np.array([[0, 1, 2], [2, 0, 1]]), 3), (np.array(5), 2)),
    ],
)
def test_offsets_edges_and_sizes_stay(variation: Any, numbers: Any, rows: int) -> None:
    assert (variations.vary_numbers(numbers, variation, rows) == numbers).all()


@pytest.mark.parametrize("variation", ALL)
def test_rows_of_whole_numbers_and_shares_stay_whole(variation: variations.Variation) -> None:
    numbers = np.array([[7, 1], [2, 9], [3, 3]])
    got = variations.vary_numbers(numbers, variation, 3)
    assert {*map(tuple, got)} <= {*map(tuple, numbers)}
    shares = variations.vary_numbers(SHARES, variation, 2)
    assert np.allclose(shares.sum(1), variation.scale or 1.0)
    infinite = variations.vary_numbers(np.array([[-np.inf, 1.0], [-np.inf, -1.0]]), variation, 2)
    assert not np.isnan(infinite).any()


class Heads(nn.Layer):  # type: ignore[misc]
    """The second stage of a detector, whose regions end the process if a box ends too early."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2D(3, 4, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, image: Any, boxes: Any) -> Any:
        count = paddle.full([image.shape[0]], boxes.shape[1], "int32")
        features = nn.functional.relu(self.conv(image))
        regions = paddle.vision.ops.roi_align(features, boxes.reshape([-1, 4]), count, 2, 0.5)
        return self.fc(regions.flatten(1)).reshape([-1, boxes.shape[1], 10]).mean(1)


@pytest.mark.parametrize("verify", [True, "first"])
def test_a_model_that_takes_boxes(verify: bool | str) -> None:
    images, boxes = paddle.randn([8, 3, 32, 32]), paddle.to_tensor(np.tile(BOXES, (4, 1, 1)))
    data = [(images, boxes), paddle.randint(0, 10, [8, 1])]
    require_bits(Heads, data, ["fc"], steps=2, verify=verify)


class Rotary(nn.Layer):  # type: ignore[misc]
    """A table that a longer input makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(2)

    def grow(self, length: int) -> None:
        self.length, self.table = length, paddle.arange(1.0, length + 1).cos().unsqueeze(1)

    def forward(self, x: Any) -> Any:
        if x.shape[1] > self.length:
            self.grow(x.shape[1])
        return self.table[: x.shape[1]]


class Turned(nn.Layer):  # type: ignore[misc]
    """Turns by such a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rotary, self.b = nn.Linear(4, 4), Rotary(), nn.Linear(4, 10)

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        return self.b(h * self.rotary(h)).mean(1)


@pytest.mark.parametrize("verify", [True, "first"])
def test_a_table_that_grows_in_a_sublayer(verify: bool | str) -> None:
    data = [paddle.randn([8, 5, 4]), paddle.randint(0, 10, [8, 1])]
    require_bits(Turned, data, ["b"], steps=2, verify=verify)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_captured_pipeline_says_what_to_copy_instead(copied: Any, tmp_path: Any) -> None:
    with job(2):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        pipe = fleetpipe.pipeline(net, paddle.randn([2, 6]), nn.CrossEntropyLoss())
        with pytest.raises(StateError, match=r"is not (copied|pickled)"):
            copied(pipe)
        single = pipe.single_model()
        x = paddle.randn([3, 6])
        paddle.jit.save(single, str(tmp_path / "net"), [paddle.static.InputSpec([None, 6])])
        loaded = paddle.jit.load(str(tmp_path / "net"))(x)
        assert np.allclose(loaded.numpy(), single(x).numpy(), atol=1e-6)
