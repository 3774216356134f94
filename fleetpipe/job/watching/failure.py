"""The failure of a rank, as it is sent to all others."""

from __future__ import annotations

import textwrap
import traceback
from dataclasses import dataclass

from fleetpipe.errors import (
    FleetPipeError,
    PeerFailed,
    PipelineTimeout,
    StateError,
    TransportError,
    is_permanent,
)

#: Longest traceback that is passed on, in characters.
LONGEST_TEXT = 20000
#: What a failed rank did, and the error that the others raise for it.
KINDS: dict[str, type[FleetPipeError]] = {
    "died": PeerFailed,
    "left": PeerFailed,
    "raised": PeerFailed,
    "timed out": PipelineTimeout,
    "sent bytes that are no message": TransportError,
    "makes another call": StateError,
}
_LONGEST_LINE = 200


@dataclass(frozen=True)
class Failure:
    """The failure of the rank that failed first.

    Attributes:
        rank: Its number in the job.
        what: The kind of failure, one of ``KINDS``.
        text: The error in one line.
        details: Its traceback, or where all ranks were; empty without either.
        permanent: Whether the job would fail again at each restart.
    """

    rank: int
    what: str
    text: str
    details: str = ""
    permanent: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describes an error with which ``rank`` gives up."""
        if isinstance(error, PipelineTimeout):
            text, *more = str(error).splitlines()
            return cls(rank, "timed out", text, "\n".join(more)[-LONGEST_TEXT:])
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        trace = "".join(lines)[-LONGEST_TEXT:]
        return cls(rank, "raised", _in_one_line(error), trace, is_permanent(error))

    def error(self, where: str | None = None) -> FleetPipeError:
        """Returns the error that the other ranks raise; a timeout stays a timeout."""
        next_step = f"read the log of rank {self.rank}: it failed first"
        if self.what == "timed out":
            next_step = (
                "look for the rank that waits for no other: it is stuck, stopped or too slow"
            )
        left = self.what == "left"
        if left:
            next_step = (
                "give all ranks as many batches, of loaders of one length, and end all alike"
            )
        cause = "its script was done, without an error: it had fewer batches, or skips a call"
        if self.what == "makes another call":
            next_step = "have every rank make the same collective calls, in the same order"
            cause = (
                "what one rank does alone, as `if rank == 0:`, an error that one rank caught, or "
                "another number of batches"
            )
        quoted = textwrap.indent(self.details.rstrip(), "    | ", lambda line: True)
        error = KINDS[self.what](
            f"rank {self.rank} {self.what}: {self.text}",
            where=where,
            got=f"from rank {self.rank}:\n{quoted}" if self.details else None,
            cause=cause if left or self.what == "makes another call" else None,
            fix=next_step,
        )
        if self.what == "raised" and isinstance(error, PeerFailed):
            error.brief = (
                f"{where or 'this rank'}: ends because rank {self.rank} raised {self.text}"
            )
        return error


def _in_one_line(error: BaseException) -> str:
    """Returns the kind of an error and its message, of fleetpipe's errors the first line."""
    words = str(error).splitlines()[:1] if isinstance(error, FleetPipeError) else str(error).split()
    text = " ".join(words)
    if len(text) > _LONGEST_LINE:
        text = text[:_LONGEST_LINE] + ".."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
