"""The standard streams of a process of fleetpipe's: open, and silent once their reader is gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


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
