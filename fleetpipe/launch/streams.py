"""Prepares the standard streams of fleetpipe's processes, and chooses the log lines to show.

:func:`prepare` opens streams that are closed, and makes them drop output when their reader is gone.
:func:`environment` and :func:`quiet` hide lines of Paddle's and fleetpipe's logs below a level.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.log import FLEETS_LOGGER, NAME

#: The levels of ``--log-level``, with their numbers in Paddle's C++ parts.
LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2}
#: The least level of lines that are shown by default.
DEFAULT_LEVEL = "WARNING"

#: The begin of a warning that is hidden in Paddle's launcher, as in :mod:`fleetpipe` itself.
_CCACHE = "No ccache found"


def prepare() -> None:
    """Opens standard streams that are closed; makes all of them drop output that nobody reads.

    Call it before libraries are imported whose logs store a stream. A second call changes nothing.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Otherwise another file would get its descriptor, here and in processes started here.
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif name != "stdin" and type(stream) is io.TextIOWrapper:
            raw = getattr(stream.buffer, "raw", stream.buffer)
            if type(raw) is io.FileIO:
                setattr(sys, name, _make_tolerant(stream, raw))


def flush(more: str = "") -> OSError | None:
    """Writes ``more`` to standard output, and flushes it.

    Returns:
        The error if that fails; None if it succeeds, or if the script has closed the stream.
    """
    if sys.stdout.closed:  # by a script
        return None
    try:
        if more:  # an unbuffered write of no bytes fails on a full disk
            sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        # Or Python would fail at its exit, when it flushes stdout again.
        silence(sys.stdout.fileno())
        return error
    return None


def silence(descriptor: int) -> None:
    """Makes a file descriptor drop all output, of this process and of those that it starts."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


class _TolerantFile(io.FileIO):
    """A file that drops output once its reader, such as ``head``, has ended.

    So the exit code of a job does not depend on its reader.
    """

    def write(self, data: Any, /) -> int | None:  # type: ignore[override,unused-ignore]
        """Writes the data, or drops it if nobody reads; returns the number of its bytes."""
        try:
            return super().write(data)
        except BrokenPipeError:
            silence(self.fileno())
            return super().write(data)


def _make_tolerant(stream: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    """Returns a stream on the descriptor of ``stream`` that goes on without its reader.

    Args:
        stream: The stream, with the options to copy.
        raw: The unbuffered file of the stream.
    """
    file = _TolerantFile(raw.fileno(), "w", closefd=False)
    file.name = raw.name
    with contextlib.suppress(BrokenPipeError):
        stream.flush()
    return io.TextIOWrapper(
        file if stream.buffer is raw else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        newline=None,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def environment(level: str) -> dict[str, str]:
    """Returns this process's environment, changed so that Paddle hides log lines below ``level``.

    Lines that Fleet logs in Python are not affected; :func:`quiet` hides these.
    """
    if LEVELS[level] == 0:
        return dict(os.environ)
    filters = [os.environ.get("PYTHONWARNINGS"), f"ignore:{_CCACHE}"]
    return {
        "GLOG_minloglevel": str(LEVELS[level]),
        **os.environ,  # the user's own level is kept
        "PYTHONWARNINGS": ",".join(filter(None, filters)),
    }


@contextmanager
def quiet(level: str) -> Iterator[None]:
    """Hides Paddle's log lines below ``level`` while the context is open; import Paddle within it.

    A level other than the default is also set for fleetpipe's log, until the process ends.
    """
    if level != DEFAULT_LEVEL:
        logging.getLogger(NAME).setLevel(level)
    if LEVELS[level] == 0:
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= least

    # A filter, since `fleet.init` sets the level of the logger.
    least: int = getattr(logging, level)
    logger, before = logging.getLogger(FLEETS_LOGGER), dict(os.environ)
    logger.addFilter(is_shown)
    os.environ.update(environment(level))
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
        for name in ("GLOG_minloglevel", "PYTHONWARNINGS"):
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
