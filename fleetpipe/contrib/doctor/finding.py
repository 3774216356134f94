"""The result of one check: how the thing is, and what to do if it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

OK, NOTE, WRONG = "ok", "note", "wrong"


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        subject: The checked thing, in a word or two.
        state: "ok", "note" if it may matter, "wrong" if a job would fail.
        text: The state in words.
        fix: What to do.
        figures: Measured values, by name with the unit.
    """

    subject: str
    state: str
    text: str
    fix: str = ""
    figures: Mapping[str, float] = {}


def looked_at(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Runs the checks and returns their findings; a check that fails is a finding itself."""
    findings = []
    for subject, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(subject, WRONG, text, "send this output with a bug report"))
    return findings


def wrong(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings with which a job would fail."""
    return [finding for finding in findings if finding.state == WRONG]
