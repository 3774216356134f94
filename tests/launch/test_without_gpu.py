"""What libraries ask of Paddle as if a GPU were there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from fleetpipe.launch.substitution import without_gpu
from fleetpipe.paddle_api.device import device_kind
from tests.fixtures import Patch

pytestmark = pytest.mark.skipif(device_kind() == "gpu", reason="a GPU has these methods")


def moved(tensor: Any) -> Any:
    return tensor.cuda().pin_memory()


@pytest.mark.skipif(
    "paddle.distributed.flex_checkpoint" not in sys.modules, reason="2.6.2 has no flex_checkpoint"
)
def test_checkpoints_get_a_copy_and_nobody_else_does(monkeypatch: Patch) -> None:
    from paddle.distributed.flex_checkpoint.dcp import full_param, load_state_dict

    def refused(_: Any) -> None:
        raise ValueError("Paddle's own")

    class Assembler(full_param.BaseAssembler):  # type: ignore[misc, unused-ignore]
        """Gathers one tensor."""

        __init__ = prepare = all_gather_fn = lambda *_: None

        def run(self) -> Iterator[tuple[str, Any]]:
            yield "weight", moved(value)

    monkeypatch.setattr(paddle.Tensor, "cuda", refused)
    monkeypatch.setattr(load_state_dict, "_load_state_dict", moved)
    value = paddle.to_tensor([1.0, 2.0])
    with without_gpu():
        loaded = load_state_dict._load_state_dict(value)
        for name, gathered in Assembler():
            assert (name, gathered.tolist()) == ("weight", [1.0, 2.0])
            with pytest.raises(ValueError, match="Paddle's own"):
                moved(value)
        loaded[0] = gathered[0] = 5.0
        assert value.tolist() == [1.0, 2.0]
        with pytest.raises(ValueError, match="Paddle's own"):
            moved(value)
    assert paddle.Tensor.cuda is refused
    assert load_state_dict._load_state_dict is moved


def test_to_synchronize_a_cpu_is_nothing() -> None:
    stock = paddle.device.synchronize
    with without_gpu():
        paddle.device.synchronize()
        if not paddle.is_compiled_with_cuda():  # one that was ends the process
            with pytest.raises(Exception, match=r"(?i)device|cuda|gpu"):
                paddle.device.synchronize("gpu:0")
    assert paddle.device.synchronize is stock
