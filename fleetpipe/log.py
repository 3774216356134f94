"""Logs notices for the user by ``logging``.

Every module has the logger of its own name, so that ``logging.getLogger("fleetpipe")`` controls
all. If nobody has configured logging, a notice is a line on standard error.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: The parent of all loggers.
NAME = "fleetpipe"
#: A logger of Paddle's whose handler is like the one that Paddle gives to the root logger.
FLEETS_LOGGER = "paddle.distributed.fleet.utils.log_util"
#: Seconds after which :func:`once_if_slow` logs.
_PATIENCE = 3.0
#: Held around :func:`once` in threads: a cache may call its function in two threads at once.
_turn = threading.Lock()

#: Handlers that :func:`_keep_out` has changed.
_kept_out: weakref.WeakSet[logging.Handler] = weakref.WeakSet()


def logger(name: str) -> logging.Logger:
    """Returns the logger of a module; its records have the ``rank`` of the job."""
    log = logging.getLogger(name)
    log.addFilter(_add_rank)
    return log


@functools.cache
def once(log: Callable[..., None], text: str, any_rank: bool = False) -> None:
    """Logs ``text`` the first time in this process.

    Args:
        log: A logger's method, say ``warning``.
        text: The notice.
        any_rank: Whether the notice is about this rank alone; else rank 0 logs it for all.
    """
    if any_rank or own_rank() == 0:
        log(text, stacklevel=2)


@contextmanager
def once_if_slow(log: Callable[..., None], text: str) -> Iterator[None]:
    """Logs ``text`` by :func:`once` if the context is still open after a few seconds."""
    timer = threading.Timer(_PATIENCE, _once_in_turn, [log, text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _once_in_turn(log: Callable[..., None], text: str) -> None:
    with _turn:
        once(log, text)


class LogObserver(logging.Handler):
    """Gives records to a function; notices are shown as they are without this handler."""

    def __init__(self, see: Callable[[logging.LogRecord], None], level: int) -> None:
        """Prepares to be added to a logger.

        Args:
            see: Gets each record; called on the thread that logs.
            level: The least level of a record.
        """
        super().__init__(level)
        self._see = see

    def emit(self, record: logging.LogRecord) -> None:
        """Gives a record to the program."""
        self._see(record)


class _Unconfigured(logging.Handler):
    """Writes records to the current ``sys.stderr``, unless the user has a handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [
            handler
            for handler in _handlers(record)
            if handler is not self and not isinstance(handler, LogObserver)
        ]
        paddles = [handler for handler in handlers if _is_paddles(handler)]
        for handler in paddles:
            _keep_out(handler)
        if len(handlers) > len(paddles):
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def own_rank() -> int:
    """Returns this process's rank in its job, as the launcher has it; 0 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = own_rank()
    return True


def _handlers(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Yields the handlers that get a record, as ``logging`` finds them."""
    source: logging.Logger | None = logging.getLogger(record.name)
    while source is not None:
        yield from source.handlers
        source = source.parent if source.propagate else None


def _is_paddles(handler: logging.Handler) -> bool:
    """Whether a handler is the one that ``import paddle`` gives to the root logger."""
    return type(handler) is logging.StreamHandler and any(
        handler is not one and _stream_and_format(handler) == _stream_and_format(one)
        for one in logging.getLogger(FLEETS_LOGGER).handlers
    )


def _stream_and_format(handler: logging.Handler) -> tuple[object, ...]:
    formatter = handler.formatter
    return getattr(handler, "stream", None), formatter and formatter._fmt


def _keep_out(handler: logging.Handler) -> None:
    """Makes a handler of Paddle's ignore fleetpipe's records, until the user changes it."""
    if handler not in _kept_out:
        _kept_out.add(handler)
        handler.addFilter(
            lambda record: record.name.partition(".")[0] != NAME or not _is_paddles(handler)
        )


def _begin() -> None:
    """Makes notices visible, unless the user has configured logging before."""
    base = logging.getLogger(NAME)
    if base.level == logging.NOTSET:
        base.setLevel(logging.INFO)
    handler = _Unconfigured()
    handler.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))
    base.addHandler(handler)


_begin()
