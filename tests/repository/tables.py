"""The tables of docs/compatibility.md, and of the names that are Paddle's own without a remark.

They have one row for each name, under the subject of its table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.launching import ROOT

PAGES = (
    ROOT / "docs" / "compatibility.md",
    ROOT / "tests" / "repository" / "paddles_own.md",
)
STATUSES = ("works", "accepted", "Paddle's own", "refused")


class Row(NamedTuple):
    """A name with its status.

    Attributes:
        kind: What the name is: "name in", "argument of", ..; the head of its table.
        subject: What it is a name, an argument, .. of; empty where the head names nothing.
        name: The name, without backticks.
        status: One of `STATUSES`.
        note: What the page says of it.
    """

    kind: str
    subject: str
    name: str
    status: str
    note: str

    def is_there_on(self, version: str) -> bool:
        """Whether the page says that this version of Paddle has the name."""
        only = re.match(r"(\d\.\d) only", self.note)
        return only is None or version.startswith(only[1])

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} {self.name}".replace("  ", " ")


def rows() -> list[Row]:
    """Returns the rows of all tables that list names."""
    found = []
    head = ""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if not line.startswith("|"):
            head = ""
            continue
        # A bar inside of backticks would need an escape; no name here has one.
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells[0]
        elif head != "status" and not set(cells[0]) <= {"-"}:
            kind, subject = re.sub("`.*`", "", head).strip(), "".join(re.findall("`(.*)`", head))
            names = re.findall("`(.+?)`", cells[0])
            found += [Row(kind, subject, name, *cells[1:]) for name in names]
    return found
