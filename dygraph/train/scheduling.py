"""Steps the learning rate after the optimizer, by the batch's loss if a scheduler needs it."""

from __future__ import annotations

import inspect

from fleetpipe.aliases import Nest, Scheduler, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

_ByLoss = paddle.optimizer.lr.ReduceOnPlateau


def require_steps(scheduler: Scheduler | None, by_micro_batch: bool = False) -> None:
    """Refuses, before the batch trains, a scheduler that cannot be stepped after it.

    Args:
        scheduler: A scheduler of Paddle's, or an object with its methods.
        by_micro_batch: Whether the batch returns the losses of its micro-batches.
    """
    if scheduler is None or (isinstance(scheduler, _ByLoss) and not by_micro_batch):
        return
    signature = inspect.signature(scheduler.step)
    try:
        signature.bind()
    except TypeError:
        raise ConfigError(
            "train_batch calls lr_scheduler.step() without arguments",
            got=f"{type(scheduler).__name__}.step{signature}"
            + ", and return_micro_batch_loss=True" * by_micro_batch,
            cause="it hands the loss to ReduceOnPlateau alone, and one loss only",
            fix="leave lr_scheduler out, and step it after train_batch by what that returns",
        ) from None


def step_rate(scheduler: Scheduler | None, loss: Nest, loss_fn_idx: int = 0) -> None:
    """Steps a scheduler after the optimizer's step.

    Args:
        scheduler: A scheduler that :func:`require_steps` has accepted.
        loss: The loss of the batch, for a ``ReduceOnPlateau``; the same on every rank. A list if
            there are several loss functions.
        loss_fn_idx: The number of the loss function that was trained.
    """
    if isinstance(scheduler, _ByLoss):
        trained: Tensor = loss[loss_fn_idx] if isinstance(loss, list) else loss
        scheduler.step(trained)
    elif scheduler is not None:
        scheduler.step()
