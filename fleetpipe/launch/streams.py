"""The standard streams of a process of fleetpipe's, and the log lines that they show.

They are open, and silent once their reader is gone. Lines of Paddle's and fleetpipe's logs below a
level are hidden.
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


def prepare() -> None:
    """Opens closed standard streams, and makes those without a reader take what is written.

    Call it before what keeps a stream, as a library's log does, is loaded. A second call changes
    nothing.
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
                setattr(sys, name, _lasting(stream, raw))


def flush(more: str = "") -> OSError | None:
    """Writes ``more`` and the buffer of stdout; returns the error if that fails."""
    if sys.stdout.closed:  # by a script
        return None
    try:
        if more:  # without buffer, a full disk refuses even nothing
            sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        # Python flushes it once more at its exit.
        silence(sys.stdout.fileno())
        return error
    return None


def silence(descriptor: int) -> None:
    """Has nothing come of what this process, and those that it starts, write to a descriptor."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _Lasting(io.FileIO):
    """A file whose reader, say ``head``, may go: then it takes everything and keeps nothing.

    The verdict of a job must not depend on who reads of it.
    """

    def write(self, data: Any, /) -> int | None:  # type: ignore[override,unused-ignore]
        try:
            return super().write(data)
        except BrokenPipeError:
            silence(self.fileno())
            return super().write(data)


def _lasting(stream: io.TextIOWrapper, raw: io.FileIO) -> io.TextIOWrapper:
    """Returns a stream like another one on the same descriptor, which stays open."""
    file = _Lasting(raw.fileno(), "w", closefd=False)
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


#: The levels, with the number that Paddle's C++ parts know each by.
LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2}
DEFAULT_LEVEL = "WARNING"

#: What is left out of the warnings of Paddle's launcher too, as in :mod:`fleetpipe` itself.
_CCACHE = "No ccache found"


def environment(level: str) -> dict[str, str]:
    """Returns the environment of a process that hides lines of Paddle's below ``level``.

    It does not affect the lines that Fleet logs in Python: see :func:`quiet`.
    """
    if LEVELS[level] == 0:
        return dict(os.environ)
    warnings_shown = [os.environ.get("PYTHONWARNINGS"), f"ignore:{_CCACHE}"]
    return {
        "GLOG_minloglevel": str(LEVELS[level]),
        **os.environ,  # what the user set goes first
        "PYTHONWARNINGS": ",".join(filter(None, warnings_shown)),
    }


@contextmanager
def quiet(level: str) -> Iterator[None]:
    """While it is open, Paddle's lines below ``level`` are hidden. Import Paddle within it.

    A level other than the default stays fleetpipe's until the process ends.
    """
    if level != DEFAULT_LEVEL:
        logging.getLogger(NAME).setLevel(level)
    if LEVELS[level] == 0:
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= least

    # A filter: `fleet.init` sets the level itself.
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
