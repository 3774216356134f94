"""The names of older Paddle: each is there while a script runs, and on the page about them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe.contrib import fluid as fluid
from fleetpipe.contrib.fluid import NAMES, Older
from fleetpipe.errors import FleetPipeError
from fleetpipe.paddle_api.device import device_kind
from tests.launching import ROOT
from tests.static.networks import static_mode

pytestmark = pytest.mark.every_row


def found(path: str) -> Any:
    """Returns what stands under a dotted name, as a script reaches it."""
    value: Any = paddle
    for part in path.split(".")[1:]:
        value = getattr(value, part)
    return value


def found_by(code: str) -> Any:
    names: dict[str, Any] = {}
    with fluid.provide():
        exec(code, names)
    return names["found"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.old)
def test_a_name_is_there_while_a_script_runs_and_on_the_page(name: Older) -> None:
    page = (ROOT / "docs" / "coming-from-fleetx.md").read_text()
    assert f"| `paddle.{name.old}` | `{name.today}` | " in page
    above, _, last = f"paddle.{name.old}".rpartition(".")
    with fluid.provide():
        there = found(f"paddle.{name.old}")
        if name.stand_in is None:
            assert there is found(name.today)
        if above.startswith("paddle.fluid"):
            assert getattr(importlib.import_module(above), last) is there


def test_afterwards_nothing_of_it_is_left() -> None:
    def everything() -> list[object]:
        places = [paddle, paddle.io.DataLoader, paddle.static.nn]
        return [[sorted(vars(place)) for place in places], sorted(sys.modules), paddle.CUDAPlace]

    before, finders = everything(), list(sys.meta_path)
    with fluid.provide():
        assert everything() != before
    assert everything() == before
    assert sys.meta_path == finders
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("paddle.fluid")


@pytest.mark.parametrize(
    "code",
    [
        "import paddle.fluid as fluid; found = fluid.core.EOFException",
        "import paddle; found = paddle.fluid.core.EOFException",
        "import paddle.fluid.core as core; found = core.EOFException",
        "from paddle.fluid import core; found = core.EOFException",
        "from paddle.fluid.core import EOFException as found",
    ],
)
def test_every_way_to_import_a_name_finds_it(code: str) -> None:
    assert found_by(code) is paddle.base.core.EOFException


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("fluid.layers.dropout", "paddle.nn.functional.dropout"),
        ("fluid.layers.reduce_sum", "paddle.sum"),
        ("fluid.layers.elementwise_sub", "paddle.subtract"),
        ("fluid.initializer.Xavier", "paddle.nn.initializer.XavierUniform"),
        ("fluid.dygraph.load_dygraph", "paddle.load"),
        ("fluid.layers.l2_normalize", "paddle.nn.functional.normalize"),
        ("fluid.Executor", "paddle.static.Executor"),
        ("fluid.optimizer", "paddle.optimizer"),
    ],
)
def test_another_name_is_an_error_that_says_what_it_is_today(name: str, today: str) -> None:
    module, _, last = name.rpartition(".")
    gone = rf"paddle\.{name} is gone since Paddle 2.5.*\n  what to do: write {today};"
    with pytest.raises(AttributeError, match=gone) as caught:
        found_by(f"import paddle.fluid as fluid; {name}")
    assert isinstance(caught.value, FleetPipeError)
    with pytest.raises(ImportError, match=gone):
        found_by(f"from paddle.{module} import {last}")
    assert found_by("import paddle.fluid as fluid; found = hasattr(fluid, 'Executor')") is False


def test_a_name_that_paddle_has_no_more_is_said_to_be_gone() -> None:
    with pytest.raises(ImportError, match=r"paddle\.fluid\.transpiler .*\n.*nothing of this name"):
        found_by("import paddle.fluid.transpiler.details")


IMAGES = np.arange(2 * 3 * 4 * 4, dtype="float32").reshape(2, 3, 4, 4)


def computed(function: Callable[..., Any], *inputs: np.ndarray, **named: Any) -> np.ndarray:
    """Runs a program of one function."""
    with static_mode():
        fed = {f"in{index}": value for index, value in enumerate(inputs)}
        values = [
            paddle.static.data(name, [-1, *value.shape[1:]], str(value.dtype))
            for name, value in fed.items()
        ]
        made = function(*values, **named)
        exe = paddle.static.Executor(paddle.CPUPlace())
        exe.run(paddle.static.default_startup_program())
        return exe.run(feed=fed, fetch_list=[made])[0]


def test_pooling_takes_windows_or_whole_images() -> None:
    windows = IMAGES.reshape(2, 3, 2, 2, 2, 2)
    pooled = computed(fluid.pool2d, IMAGES, pool_size=2, pool_stride=2)
    assert pooled.tolist() == windows.max((3, 5)).tolist()
    pooled = computed(fluid.pool2d, IMAGES, pool_size=2, pool_stride=2, pool_type="avg")
    assert pooled.tolist() == windows.mean((3, 5)).tolist()
    whole = computed(fluid.pool2d, IMAGES, pool_type="avg", global_pooling=True)
    assert whole.tolist() == IMAGES.mean((2, 3), keepdims=True).tolist()
    last = np.moveaxis(IMAGES, 1, 3)
    whole = computed(fluid.pool2d, last, global_pooling=True, data_format="NHWC")
    assert whole.tolist() == last.max((1, 2), keepdims=True).tolist()


def test_layers_have_the_parameters_that_they_are_told() -> None:
    two = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(2.0))
    convolved = computed(
        fluid.conv2d, -IMAGES, num_filters=2, filter_size=1, param_attr=two, act="relu"
    )
    assert convolved.shape == (2, 2, 4, 4)
    assert not convolved.any()
    summed = computed(fluid.fc, IMAGES, size=5, param_attr=two, bias_attr=two)
    assert summed.tolist() == [[2 * float(image.sum()) + 2] * 5 for image in IMAGES]
    normed = computed(fluid.batch_norm, IMAGES, param_attr=two, bias_attr=two)
    assert np.allclose(normed.mean((0, 2, 3)), 2, atol=1e-5)
    assert np.allclose(normed.std((0, 2, 3)), 2, atol=1e-3)
    rows = computed(fluid.embedding, np.array([[1], [2]]), size=[4, 3], param_attr=two)
    assert rows.tolist() == [[[2.0] * 3]] * 2
    added = computed(fluid.elementwise_add, IMAGES, -2 * IMAGES, act="relu")
    assert not added.any()


@pytest.mark.skipif(device_kind() == "gpu", reason="Paddle's own CUDAPlace works here")
def test_a_cuda_place_is_a_cpu_where_there_is_no_gpu() -> None:
    with fluid.provide():
        place = paddle.CUDAPlace(0)
    assert isinstance(place, paddle.CPUPlace)
    with static_mode():
        value = paddle.ones([2])
        (ones,) = paddle.static.Executor(place).run(fetch_list=[value])
    assert ones.tolist() == [1.0, 1.0]
