"""Builds the list of callbacks of a ``fit``, an ``evaluate`` or a ``predict``.

It has the user's callbacks and fleetpipe's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.hapi.callbacks import CallbackList, config_callbacks

from fleetpipe.aliases import Nest
from fleetpipe.errors import ConfigError
from fleetpipe.fit import arguments
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.callbacks.metrics import MetricsLogger
from fleetpipe.fit.callbacks.progress import Progress
from fleetpipe.fit.micro_batches import as_list
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import learning_rate_of

_config_callbacks: Callable[..., CallbackList] = config_callbacks


def build_callback_list(
    model: Any,
    callbacks: Nest,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    log_freq: int = 1,
    save_freq: int = 1,
    save_dir: str | None = None,
    verbose: int = 0,
) -> CallbackList:
    """Returns Paddle's ``CallbackList`` of the callbacks that run on this rank.

    Args:
        model: The ``fleetpipe.Model`` whose loop calls them.
        callbacks: The user's: None, one, or several; a string is a format of ``MetricsLogger``.
        epochs: The number of epochs, which the callbacks get in ``params``.
        steps: The number of batches of an epoch, which the callbacks get in ``params``.
        log_freq: Batches from one line of the progress to the next.
        save_freq: Epochs from one saved model to the next.
        save_dir: The folder in which models are saved; None saves none.
        verbose: As for ``fit``.

    Raises:
        ConfigError: An argument is no callback, or a number is out of range.
    """
    arguments.require_numbers(log_freq=log_freq)
    items = as_list(callbacks)
    formats = [item for item in items if isinstance(item, str)]
    users = [item for item in items if not isinstance(item, str)]
    if formats:
        users.append(MetricsLogger(save_dir or "run", formats=("jsonl", *formats)))
    on_rank = [rank_policy.callback_of_rank(user, model.is_rank) for user in users if user]

    def has_callback(kind: type) -> bool:
        return any(isinstance(callback, kind) for callback in on_rank)

    # Without a callback of these kinds Paddle would add its own.
    if not has_callback(rank_policy.ModelCheckpoint):
        model_folder = None if has_callback(PipelineCheckpoint) else save_dir
        on_rank.append(rank_policy.ModelCheckpoint(save_freq, model_folder))
    if not has_callback(paddle.callbacks.LRScheduler):
        on_rank.append(rank_policy.LRScheduler())
    _refuse_reduce_on_plateau(model, on_rank)
    if verbose and not has_callback(paddle.callbacks.ProgBarLogger):
        on_rank.insert(0, Progress(log_freq, verbose))
    return _config_callbacks(
        on_rank,
        model=model,
        epochs=epochs,
        steps=steps,
        verbose=verbose,
        save_dir=save_dir,
        metrics=model.metric_names,
    )


def _refuse_reduce_on_plateau(model: Any, callbacks: list[Any]) -> None:
    """Raises an error for a learning rate that the callbacks cannot step.

    Raises:
        ConfigError: The rate is a ``ReduceOnPlateau``, whose step takes a loss that Paddle's
            callback does not pass.
    """
    rate = None if model.optimizer is None else learning_rate_of(model.optimizer.wrapped)
    if isinstance(rate, paddle.optimizer.lr.ReduceOnPlateau) and any(
        isinstance(callback, paddle.callbacks.LRScheduler)
        and (callback.by_step or callback.by_epoch)
        for callback in callbacks
    ):
        raise ConfigError(
            "fit steps the learning rate without a loss",
            got="the optimizer's rate is a ReduceOnPlateau, whose step takes one",
            fix="give the optimizer a number, and fit paddle.callbacks.ReduceLROnPlateau(..)",
        )
