"""What libraries ask of Paddle as if a GPU were there, on machines that have none.

- Paddle 3.3's flexible checkpoints, which PaddleFormers reads and writes, move to a GPU what the
  processes of a job send each other. Gloo sends from where a value is.
- ``paddle.device.synchronize()``, which its Trainer calls, refuses a CPU, where all is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import resharding_within


@contextmanager
def without_gpu() -> Iterator[None]:
    """Within it those checkpoints copy values where they are, and to synchronize a CPU is nothing.

    Everybody else's ``Tensor.cuda`` and ``pin_memory`` are Paddle's. Nothing happens where this
    process computes on a GPU.
    """
    if device_kind() == "cpu":
        skipping = _skipping(paddle.device.synchronize)
        with resharding_within(_copying), replaced((paddle.device, "synchronize", skipping)):
            yield
    else:
        yield


@contextmanager
def _copying() -> Iterator[None]:
    clone = paddle.Tensor.clone
    with replaced((paddle.Tensor, "cuda", clone), (paddle.Tensor, "pin_memory", clone)):
        yield


def _skipping(function: Callable[..., Any]) -> Callable[..., None]:
    def synchronize(device: Any = None) -> None:
        if device is not None or device_kind() != "cpu":
            function(device)

    return synchronize
