"""What libraries ask of Paddle as if a GPU were there, on machines that have none.

- Paddle 3.3's flexible checkpoints, which PaddleFormers reads and writes, move to a GPU what the
  processes of a job send each other. Gloo sends from where a value is.
- ``paddle.device.synchronize()``, which its Trainer calls, refuses a CPU, where all is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind

#: The package of Paddle 3.3 whose calls are answered; 2.6.2 has none of that name.
CHECKPOINTS = "paddle.distributed.flex_checkpoint"


@contextmanager
def without_gpu() -> Iterator[None]:
    """Within it those checkpoints copy values where they are, and to synchronize a CPU is nothing.

    Everybody else's ``Tensor.cuda`` and ``pin_memory`` are Paddle's. Nothing happens where this
    process computes on a GPU.
    """
    with ExitStack() as changes:
        if device_kind() == "cpu":
            for name in ("cuda", "pin_memory"):
                changes.enter_context(_replaced(paddle.Tensor, name, _copying))
            changes.enter_context(_replaced(paddle.device, "synchronize", _skipping))
        yield


@contextmanager
def _replaced(
    owner: object, name: str, change: Callable[[Callable[..., Any]], object]
) -> Iterator[None]:
    stock = getattr(owner, name)
    setattr(owner, name, change(stock))
    try:
        yield
    finally:
        setattr(owner, name, stock)


def _copying(method: Callable[..., Any]) -> Callable[..., Tensor]:
    def copied(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(CHECKPOINTS):
            return tensor.clone()
        return method(tensor, *arguments, **named)

    return copied


def _skipping(function: Callable[..., Any]) -> Callable[..., None]:
    def synchronize(device: Any = None) -> None:
        if device is not None or device_kind() != "cpu":
            function(device)

    return synchronize
