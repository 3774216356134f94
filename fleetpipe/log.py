"""Logs notices for the user by ``logging``.

Every module has the logger of its own name, so that ``logging.getLogger("fleetpipe")`` controls
all. Unless the user has configured logging, a notice is a line on standard error.
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
#: A logger of Paddle's. Its handler has the stream and the format of the one that ``import paddle``
#: gives to the root logger, by which that one is recognized.
FLEETS_LOGGER = "paddle.distributed.fleet.utils.log_util"
#: Seconds after which :func:`once_if_slow` logs.
_PATIENCE = 3.0
#: Taken by the threads of :func:`once_if_slow` to call :func:`once`: the cache of ``once`` runs the
#: function twice if two threads call it at the same moment, and both would log.
_once_lock = threading.Lock()

#: The handlers of Paddle's from which :func:`_hide_from` hides fleetpipe's records.
_hidden_from: weakref.WeakSet[logging.Handler] = weakref.WeakSet()


def logger(name: str) -> logging.Logger:
    """Returns the logger of a module; its records have the attribute ``rank``, as formats may."""
    log = logging.getLogger(name)
    log.addFilter(_add_rank)
    return log


@functools.cache
def once(log: Callable[..., None], text: str, any_rank: bool = False) -> None:
    """Logs ``text``, only the first time in this process.

    Args:
        log: A logger's method, say ``warning``.
        text: The notice.
        any_rank: Whether every rank logs the notice, as it is about this rank alone; else only
            rank 0 logs it.
    """
    if any_rank or own_rank() == 0:
        log(text, stacklevel=2)


@contextmanager
def once_if_slow(log: Callable[..., None], text: str) -> Iterator[None]:
    """Opens a context; if it is still open after three seconds, logs ``text`` by :func:`once`."""
    timer = threading.Timer(_PATIENCE, _once_under_lock, [log, text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _once_under_lock(log: Callable[..., None], text: str) -> None:
    """Logs a text once, in the thread of a timer, while no other such thread does."""
    with _once_lock:
        once(log, text)


class LogObserver(logging.Handler):
    """Passes log records to a function; standard error shows them too."""

    def __init__(self, observe: Callable[[logging.LogRecord], None], level: int) -> None:
        """Creates a handler, to be added to a logger.

        Args:
            observe: Gets each record; called on the thread that logs.
            level: The lowest level of a record.
        """
        super().__init__(level)
        self._observe = observe

    def emit(self, record: logging.LogRecord) -> None:
        """Passes a record to the function."""
        self._observe(record)


class _StderrHandler(logging.Handler):
    """Writes records to the current ``sys.stderr``, unless a handler of the user's gets them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, unless a handler of the user's gets it."""
        has_users_handler = False
        for handler in _handlers_of(record):
            if handler is self or isinstance(handler, LogObserver):
                continue
            if _is_paddles(handler):
                _hide_from(handler)
            else:
                has_users_handler = True
        if has_users_handler:
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
    """Adds the attribute ``rank`` to a log record; as a filter it lets every record pass."""
    record.rank = own_rank()
    return True


def _handlers_of(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Yields the handlers that get a record, as ``logging`` finds them."""
    source: logging.Logger | None = logging.getLogger(record.name)
    while source is not None:
        yield from source.handlers
        source = source.parent if source.propagate else None


def _is_paddles(handler: logging.Handler) -> bool:
    """Returns whether a handler is the one that ``import paddle`` gives to the root logger."""
    return type(handler) is logging.StreamHandler and any(
        handler is not fleets and _stream_and_format(handler) == _stream_and_format(fleets)
        for fleets in logging.getLogger(FLEETS_LOGGER).handlers
    )


def _stream_and_format(handler: logging.Handler) -> tuple[object, ...]:
    """Returns the stream and the format string of a handler; None for one that it lacks."""
    formatter = handler.formatter
    return getattr(handler, "stream", None), formatter and formatter._fmt


def _hide_from(handler: logging.Handler) -> None:
    """Makes a handler of Paddle's ignore fleetpipe's records, until the user changes it."""
    if handler not in _hidden_from:
        _hidden_from.add(handler)
        handler.addFilter(
            lambda record: record.name.partition(".")[0] != NAME or not _is_paddles(handler)
        )


def _show_notices() -> None:
    """Makes notices visible, unless the user has configured logging before."""
    base = logging.getLogger(NAME)
    if base.level == logging.NOTSET:
        base.setLevel(logging.INFO)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))
    base.addHandler(handler)


_show_notices()
