"""The private names of Paddle that the training loop needs, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

from fleetpipe.aliases import Optimizer, Scheduler


def prefix(optimizer: Optimizer) -> str:
    """Returns what stands before the kind in the names of an optimizer's state."""
    return "" if optimizer._name is None else f"{optimizer._name}_"


def scheduler_of(optimizer: Optimizer) -> Scheduler:
    """Returns the schedule of an optimizer's learning rate; None where it is a number."""
    rate = optimizer._learning_rate
    return rate if hasattr(rate, "set_state_dict") else None
