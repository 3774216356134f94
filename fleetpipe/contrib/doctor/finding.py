"""One thing that was looked at: how it is, and what to do where it is not as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

OK, NOTE, WRONG = "ok", "note", "wrong"


class Finding(NamedTuple):
    """What a look at one thing says.

    Attributes:
        subject: The thing, in a word or two.
        state: "ok", "note" where it may matter, "wrong" where a job would fail.
        text: How it is.
        fix: What to do.
        figures: What was measured, by name with its unit.
    """

    subject: str
    state: str
    text: str
    fix: str = ""
    figures: Mapping[str, float] = {}


def looked_at(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Returns what each check says; one that fails is wrong itself."""
    findings = []
    for subject, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(subject, WRONG, text, "send this output with a bug report"))
    return findings


def wrong(findings: Iterable[Finding]) -> list[Finding]:
    """Returns those with which a job would fail."""
    return [finding for finding in findings if finding.state == WRONG]
