"""How a life of a job ended: who failed first, in which step, and what that means for the next."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleetpipe.job import life
from fleetpipe.job.watching.failure import Failure
from fleetpipe.job.watching.watch import EXIT_CODE
from fleetpipe.launch.script import in_a_shell

#: Status of a job of which one step failed twice in a row: EX_DATAERR.
POISONED = 65
_MOST_LINES = 12


@dataclass(frozen=True)
class Verdict:
    """How a life ended.

    Attributes:
        code: 0 where every rank did its work; else the code of the rank that failed first, as a
            shell has it.
        saved: Steps that were saved where the life was asked to end; else None.
        step: The step in which the first rank failed; None before the first.
        culprit: Who failed first, and how; empty where nobody did.
        details: What its last words were, or where all ranks were.
        raised: Whether it raised an error, as it would again.
        own: Whether that rank was one of the host that judges.
        gone: Whether a host was lost with it, which tells nothing of the step it was in.
    """

    code: int
    saved: int | None = None
    step: int | None = None
    culprit: str = ""
    details: str = ""
    raised: bool = False
    own: bool = True
    gone: bool = False

    def __str__(self) -> str:
        """The text form, of which :meth:`parse` is the inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Verdict:
        """Reads what another host said.

        Raises:
            ValueError: It is no verdict.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.keys() != _FIELDS.keys():
            raise ValueError("no verdict")
        if not all(isinstance(fields[name], types) for name, types in _FIELDS.items()):
            raise ValueError("a verdict with fields of other types")
        return cls(**fields)

    def repeats(self, other: Verdict) -> bool:
        """Whether this failure is the one of ``other`` once more.

        That is one in the same step; before any step, where a rank may have been killed while it
        loaded, one with the same kind of error from the same line. A host that is lost repeats
        nothing.
        """
        if self.gone or other.gone:
            return False
        if self.step is None or other.step is None:
            both = self.raised and other.raised
            return self.step is other.step and both and self._cause() == other._cause()
        return self.step == other.step

    @property
    def disk_full(self) -> bool:
        """Whether the disk had no room left: nothing is wrong with the step."""
        words = f"{self.culprit}\n{self.details}"
        return any(os.strerror(number) in words for number in (errno.ENOSPC, errno.EDQUOT))

    def _cause(self) -> tuple[str, list[str]]:
        """Returns the kind of the error, and the line of code that raised it.

        What it says may have a time in it, or an address, and any rank may be the first to say it.
        """
        _, _, error = self.culprit.partition(" raised: ")
        return error.partition(":")[0], re.findall(r'File "[^"]+", line \d+', self.details)[-1:]


_FIELDS: dict[str, tuple[type, ...]] = {
    "code": (int,),
    "saved": (int, type(None)),
    "step": (int, type(None)),
    "culprit": (str,),
    "details": (str,),
    "raised": (bool,),
    "own": (bool,),
    "gone": (bool,),
}


def joint(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns what the verdicts of all hosts of a life come to.

    Each host tells of the rank that failed first, as far as it knows; that on which it ran knows.
    """
    failed = [verdict for verdict in verdicts if verdict.code]
    saved = [verdict.saved for verdict in verdicts if verdict.saved is not None]
    if not failed or saved:
        return Verdict(0, max(saved, default=None))
    steps = [verdict.step for verdict in failed if verdict.step is not None]
    first = ([verdict for verdict in failed if verdict.own] or failed)[0]
    gone = any(verdict.gone for verdict in failed)
    return replace(first, step=max(steps, default=None), gone=gone)


def judge(home: Path, code: int) -> Verdict:
    """Judges a life by what its ranks and its launcher left in its folder.

    Args:
        home: The folder.
        code: The exit code of Paddle's launcher.
    """
    saved = life.preempted_at(home)
    if code == 0 or saved is not None:
        return Verdict(code, saved)
    steps = life.steps_begun(home)
    rank, failed, told = _first(home)
    step = None if rank is None else steps.get(rank, max(steps.values(), default=None))
    if rank is None:
        return Verdict(code, culprit=f"Paddle's launcher ended with {code}", own=False)
    own = rank in dict(life.started(home)) or rank in dict(life.ended(home))
    who, code = f"rank {rank}", in_a_shell(failed) or code
    if told is None:
        return Verdict(code, None, step, f"{who} {_in_words(failed)} without a word", own=own)
    signalled = f" ({_in_words(failed)})" if failed < 0 else ""
    words = f"{who} {told.what}{signalled}: {told.text}"
    details = "\n".join(told.details.rstrip().splitlines()[-_MOST_LINES:])
    return Verdict(code, None, step, words, details, told.what == "raised", own)


def _first(home: Path) -> tuple[int | None, int, Failure | None]:
    """Returns the rank that failed first, its exit code, and what is told of it."""
    failures = [told.failure for told in life.failures(home)]
    ended = [(rank, life.code_of(home, rank) or code) for rank, code in life.ended(home)]
    failed = [(rank, code) for rank, code in ended if code]
    own = [(rank, code) for rank, code in failed if code != EXIT_CODE] or failed
    # A process that is ended by a signal tells nobody; before it others do not fail.
    if own and own[0][1] < 0 and own[0] == failed[0]:
        rank = own[0][0]
    elif failures:
        rank = failures[0].rank
    elif own:
        rank = own[0][0]
    else:
        return None, 0, None
    told = [failure for failure in failures if failure.rank == rank]
    return rank, dict(ended).get(rank, 0), told[0] if told else None


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
