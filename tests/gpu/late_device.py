"""A device that computes behind the host, and a model on it: stand-ins, and so is the time.

Layers tell the device what their work takes, and nothing but waiting for it takes any.
"""

from __future__ import annotations

import time
from typing import Any

import paddle
from paddle import nn

from fleetpipe.systems import ProcessorQueue
from tests.fixtures import Patch
from tests.pipelines import FEATURES, model_in_job

#: Seconds that the forward of a layer takes; its backward takes twice as long.
QUICK, SLOW = 1.0, 3.0


class LateDevice:
    """A device, and its stream, that has done its work once somebody has asked about it."""

    def __init__(self) -> None:
        self.now, self.queued, self.waits = 0.0, 0.0, 0

    def query(self) -> bool:
        """Whether everything has been done, as ``paddle.device.current_stream().query()``."""
        done, self.waits = not self.queued, self.waits + 1
        self.now, self.queued = self.now + self.queued, 0.0
        return done


def late_device(monkeypatch: Patch) -> LateDevice:
    """Puts a late device, and its time, into the place of this machine's."""
    late = LateDevice()
    monkeypatch.setattr(paddle.device, "current_stream", lambda: late)
    for clock in ("perf_counter", "monotonic", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: late.now)
    monkeypatch.setattr(ProcessorQueue, "seconds", lambda _: 0.0)
    return late


def late_model(device: LateDevice, **options: Any) -> Any:
    """A pipeline of two ranks in this process, whose second stage takes three times as long."""

    class Works(nn.Linear):  # type: ignore[misc]
        def __init__(self, seconds: float) -> None:
            super().__init__(FEATURES, FEATURES)
            self.seconds = seconds

        def forward(self, x: Any) -> Any:
            return Queued.apply(super().forward(x), self.seconds)

    class Queued(paddle.autograd.PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, y: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            device.queued += seconds
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            device.queued += 2 * ctx.seconds
            return grad

    return model_in_job(2, 2, layers=[Works(QUICK), Works(SLOW)], seg_method=[0, 1], **options)
