"""What libraries ask of Paddle as if a GPU were there."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from fleetpipe.launch.without_gpu import CHECKPOINTS, without_gpu
from fleetpipe.paddle_api.device import device_kind

pytestmark = pytest.mark.skipif(device_kind() == "gpu", reason="a GPU has these methods")


def caller(module: str) -> Any:
    """A function of a module that moves a value as Paddle's checkpoints do."""
    names: dict[str, Any] = {"__name__": module}
    exec("def move(tensor): return tensor.cuda().pin_memory()", names)
    return names["move"]


def test_checkpoints_get_a_copy_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Any) -> None:
        raise ValueError("Paddle's own")  # 2.6.2 ends the process here

    monkeypatch.setattr(paddle.Tensor, "cuda", refused)
    value = paddle.to_tensor([1.0, 2.0])
    with without_gpu():
        moved = caller(f"{CHECKPOINTS}.dcp.reshard_comm")(value)
        assert moved.tolist() == [1.0, 2.0]
        moved[0] = 5.0
        assert value.tolist() == [1.0, 2.0]
        with pytest.raises(ValueError, match="Paddle's own"):
            caller("script")(value)
    assert paddle.Tensor.cuda is refused


def test_to_synchronize_a_cpu_is_nothing() -> None:
    stock = paddle.device.synchronize
    with without_gpu():
        paddle.device.synchronize()
        if not paddle.is_compiled_with_cuda():  # one that was ends the process
            with pytest.raises(Exception, match=r"(?i)device|cuda|gpu"):
                paddle.device.synchronize("gpu:0")
    assert paddle.device.synchronize is stock
