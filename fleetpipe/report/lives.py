"""The lives of a run: each time it began, at which step, and how that ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: The code of what Ctrl-C has ended.
INTERRUPTED = 130


@dataclass
class Life:
    """One of them.

    Attributes:
        began: Seconds since 1970.
        step: Steps that the run had behind it then.
        ended: When; None where nobody has told.
        last_step: The step in which it failed, or as many as were done or saved at its end.
        outcome: How it ended, in words; empty where nobody has told.
        details: The last words of the rank that failed.
        failed: Whether some rank failed.
        finished: Whether the training came to its end.
    """

    began: float
    step: int
    ended: float | None = None
    last_step: int | None = None
    outcome: str = ""
    details: str = ""
    failed: bool = False
    finished: bool = False


def lives_of(lines: Iterable[Mapping[str, Any]]) -> list[Life]:
    """Returns the lives that the lines of ``lives.jsonl`` tell of, in their order.

    Several trainings of one process are one life.
    """
    found: list[Life] = []
    current: object = None
    for line in lines:
        if line.get("event") == "begin":
            process = (line.get("process"), line.get("life"))
            if process != current or not found:
                found.append(Life(_number(line.get("time")), int(_number(line.get("step")))))
            current = process
            found[-1].ended = None
        elif line.get("event") == "end" and found:
            _end(found[-1], line)
    return found


def _end(life: Life, line: Mapping[str, Any]) -> None:
    life.ended = _number(line.get("time"))
    code, saved, step = (line.get(name) for name in ("code", "saved", "step"))
    life.finished = code == 0 and saved is None
    interrupted = code == INTERRUPTED
    life.failed = not life.finished and not interrupted and saved is None
    last = step if saved is None else saved
    life.last_step = int(last) if isinstance(last, (int, float)) else None
    if life.finished:
        life.outcome = "finished"
    elif saved is not None:
        why = "interrupted" if interrupted else "asked to stop"
        life.outcome = f"{why}, and saved {life.last_step} steps"
    elif interrupted:
        life.outcome = "interrupted"
    else:
        life.outcome = str(line.get("culprit") or f"ended with {code}")
        life.details = str(line.get("details") or "")


def _number(value: Any) -> float:
    usable = isinstance(value, (int, float)) and abs(value) < 1e15
    return float(value) if usable else 0.0
