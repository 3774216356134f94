"""The collective calls that a rank has begun, which all ranks begin alike and in one order.

The kind of the last one is in the header of each message, and its number and line are in the status
that a rank sends to all others five times a second: no message is sent for them alone.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from operator import attrgetter
from typing import NamedTuple

#: Calls of its past that a rank can be compared with; another rank is not further ahead.
_MOST_CALLS = 512
#: Packages whose frames are not the script's.
_NOT_THE_SCRIPTS = {"fleetpipe", "paddle", "contextlib", "decorator", "functools"}


class CollectiveCall(NamedTuple):
    """A collective call.

    Attributes:
        number: Its number among those of one replica, from 1.
        of_job: Its number among those that all replicas begin; 0 if it is none of them.
        kind: What all ranks that begin it have in common.
        words: What the rank does, and the line of the script.
    """

    number: int = 0
    of_job: int = 0
    kind: str = ""
    words: str = ""


class CollectiveCalls:
    """The last calls of this process; the main thread begins them, another one compares them.

    Attributes:
        replica: The ranks of this process's replica.
    """

    def __init__(self) -> None:
        self.replica: frozenset[int] = frozenset()
        self._calls = deque([CollectiveCall()], _MOST_CALLS)
        self._of_job = 0

    @property
    def last(self) -> CollectiveCall:
        """The last call that has begun; one without a kind before the first."""
        return self._calls[-1]

    def begin(self, words: str, kind: str = "", replicas: bool = True) -> int:
        """Begins a call.

        Args:
            words: What this rank does, as ``trains a batch``.
            kind: What its words are on all ranks; by default the words.
            replicas: Whether all replicas begin it.

        Returns:
            A number of its kind, for the headers of messages.
        """
        self._of_job += replicas
        words, kind = f"{words} ({line_of_the_script()})", kind or words
        number = self.last.number + 1
        self._calls.append(CollectiveCall(number, self._of_job if replicas else 0, kind, words))
        return zlib.crc32(kind.encode())

    def mismatch(self, other: CollectiveCall, same_replica: bool) -> CollectiveCall | None:
        """Returns this process's call of the same number, if it is of another kind than ``other``.

        Args:
            other: The last call of the other rank.
            same_replica: Whether that rank is of this one's replica.
        """
        number = attrgetter("number" if same_replica else "of_job")
        # Of a copy: the main thread may add one meanwhile.
        calls = [call for call in [*self._calls] if number(call) == number(other) > 0]
        return calls[0] if calls and calls[0].kind != other.kind else None


def line_of_the_script() -> str:
    """Returns the file and the line of the script that called into fleetpipe."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _NOT_THE_SCRIPTS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
