"""Which device runs, and the mode in which tensors can be made.

``paddle.base.dygraph.base.guard`` holds for 2.6.2 and 3.3.x.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paddle.base.dygraph.base import guard

from fleetpipe.paddle_api import paddle


def device_kind() -> str:
    """Returns on what this process computes: ``"cpu"``, ``"gpu"`` or Paddle's name of another kind.

    That is the device that runs: a Paddle that was built for GPUs runs on a CPU where there is none
    and where ``CUDA_VISIBLE_DEVICES`` hides them all.
    """
    device: str = paddle.device.get_device()
    return device.partition(":")[0]


@contextmanager
def dynamic_mode() -> Iterator[None]:
    """Runs its body in dynamic graph mode: no tensor can be made or shared in the other one."""
    if paddle.in_dynamic_mode():
        yield
    else:
        with guard():
            yield
