"""``LinearWarmupLR``: the learning rate of ColossalAI's tutorial, made of Paddle's schedulers."""

from __future__ import annotations

from typing import Any

from fleetpipe.aliases import Optimizer
from fleetpipe.paddle_api import paddle


class LinearWarmupLR(paddle.optimizer.lr.LinearWarmup):
    """A learning rate that rises in equal steps to the optimizer's, then falls in equal steps to 0.

    With T steps, w of them to warm up, and a peak r, the rate is r (e + 1) / (w + 1) in step e < w,
    and r (T - e) / (T - w) from there on. The program steps it, usually once per epoch.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        """Replaces the learning rate of an optimizer by this scheduler, whose peak it becomes.

        Args:
            optimizer: A Paddle optimizer with a number as its learning rate, not wrapped yet.
            total_steps: T, steps in all.
            warmup_steps: w, steps in which the rate rises.
            last_epoch: The step to go on from; -1 at the beginning.
        """
        rate: float = optimizer.get_lr()
        decay: Any = paddle.optimizer.lr.PolynomialDecay(
            rate, total_steps - warmup_steps, end_lr=0.0, power=1.0
        )
        start = rate / (warmup_steps + 1)
        super().__init__(decay, warmup_steps, start, rate, last_epoch)
        optimizer.set_lr_scheduler(self)
