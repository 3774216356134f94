"""The attempts of a run, of which ``lives.jsonl`` says when each began and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: The exit code of what Ctrl-C has ended.
INTERRUPTED = 130


@dataclass
class AttemptRecord:
    """One start of a run.

    Attributes:
        began: Seconds since 1970.
        step: Steps that the run had done before.
        ended: Seconds since 1970; None if not recorded.
        last_step: The step in which it failed, or the number of steps done or saved at its end.
        outcome: How it ended, in words; empty if not recorded.
        details: The last output of the rank that failed.
        failed: Whether some rank failed.
        finished: Whether the training was completed.
    """

    began: float
    step: int
    ended: float | None = None
    last_step: int | None = None
    outcome: str = ""
    details: str = ""
    failed: bool = False
    finished: bool = False


def attempts_of(lines: Iterable[Mapping[str, Any]]) -> list[AttemptRecord]:
    """Returns the attempts recorded in the lines of ``lives.jsonl``, in order.

    Several trainings of one process are one attempt.
    """
    attempts: list[AttemptRecord] = []
    current: object = None
    for line in lines:
        if line.get("event") == "begin":
            process = (line.get("process"), line.get("life"))
            if process != current or not attempts:
                attempts.append(
                    AttemptRecord(_number(line.get("time")), int(_number(line.get("step"))))
                )
            current = process
            attempts[-1].ended = None
        elif line.get("event") == "end" and attempts:
            _end(attempts[-1], line)
    return attempts


def _end(attempt: AttemptRecord, line: Mapping[str, Any]) -> None:
    attempt.ended = _number(line.get("time"))
    code, saved, step = (line.get(name) for name in ("code", "saved", "step"))
    attempt.finished = code == 0 and saved is None
    interrupted = code == INTERRUPTED
    attempt.failed = not attempt.finished and not interrupted and saved is None
    last = step if saved is None else saved
    attempt.last_step = int(_number(last)) if _is_usable(last) else None
    if attempt.finished:
        attempt.outcome = "finished"
    elif saved is not None:
        why = "interrupted" if interrupted else "asked to stop"
        attempt.outcome = f"{why}, and saved {attempt.last_step} steps"
    elif interrupted:
        attempt.outcome = "interrupted"
    else:
        attempt.outcome = str(line.get("culprit") or f"ended with {code}")
        attempt.details = str(line.get("details") or "")


def _number(value: Any) -> float:
    return float(value) if _is_usable(value) else 0.0


def _is_usable(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e15
