"""The learning rate of the reference: schedulers of its own, which only the reference steps."""

from __future__ import annotations

import copy

from fleetpipe.aliases import Optimizer, Scheduler
from fleetpipe.dygraph import PipelineOptimizer
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import learning_rate_of
from fleetpipe.parity.differences import Difference, compare_numbers


class Rates:
    """The learning rates of the two sides of one step.

    Between two steps the script may change the rate as it likes. So the reference begins each step
    with a copy of what the pipeline has then, and steps it by itself.
    """

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        twin: Optimizer,
        lr_scheduler: Scheduler | None,
        follow: bool,
    ) -> None:
        """Begins a step.

        Args:
            optimizer: The pipeline's.
            twin: The reference's.
            lr_scheduler: What the pipeline steps after the optimizer, or None.
            follow: Whether the reference takes the pipeline's rate. Not where a user's own
                optimizer has a scheduler of its own, which the user steps.
        """
        self._optimizer = optimizer.wrapped
        self._twin = twin
        self._theirs = lr_scheduler
        self._own: Scheduler | None = None
        rate = learning_rate_of(self._optimizer)
        self._follow = follow or learning_rate_of(twin) is rate
        if not self._follow:
            return
        # A scheduler may refer to its optimizer, and one scheduler to another.
        memo = {id(optimizer): twin, id(self._optimizer): twin}
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            twin.set_lr_scheduler(copy.deepcopy(rate, memo))
        else:
            twin.set_lr(rate)
        self._own = copy.deepcopy(lr_scheduler, memo)

    def used(self, step: int) -> list[Difference]:
        """Compares the learning rates that the optimizers have now."""
        ours, theirs = self._optimizer.get_lr(), self._twin.get_lr()
        return compare_numbers("learning rate", "", step, ours, theirs)

    def stepped(self, step: int) -> list[Difference]:
        """Steps the reference's scheduler where the pipeline has stepped its own; compares them."""
        if not self._follow:
            return []
        if self._own is not None:
            self._own.step()
        found = self.used(step)
        theirs, own = (getattr(one, "last_epoch", 0) for one in (self._theirs, self._own))
        name = type(self._theirs).__name__
        return found + compare_numbers("last_epoch", name, step, theirs, own)
