"""The page of environment variables has every one that the sources read or set, and no other."""

from __future__ import annotations

import re

from tests.launching import ROOT
from tests.test_house import modules

VARIABLE = re.compile(
    r"\b(?:FLEETPIPE|PADDLE|FLAGS|OMP|MKL|GLOO|GLOG|MALLOC|GLIBC|SLURM|CUDA|NCCL|OMPI|PMI|MASTER)"
    r"_[A-Za-z0-9_]+\b"
)
#: ``os.environ["NAME"]``, ``os.environ.get("NAME", ..)``, ``"NAME" in os.environ``.
ACCESS = re.compile(r'(?:environ(?:\.\w+\(|\[)|getenv\()"(\w+)"|"(\w+)" (?:not )?in os\.environ')
#: Names in the sources that only look so.
OTHERS = {"FLEETPIPE_DEFAULTS", "FLEETPIPE_ACC", "MASTER_WEIGHTS", "PADDLE_TRAINER"}


def test_the_page_has_every_variable() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in modules().values()]
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in sources for found in ACCESS.findall(text) for name in found if name}
    named = {name for text in sources for name in VARIABLE.findall(text)} | read
    named |= {name for text in tests for name in re.findall(r"\bFLEETPIPE_TEST_[A-Z]+\b", text)}
    shown = set(re.findall(r"`([A-Z]+_\w+|[A-Z]{9,})`", page))
    assert named - OTHERS <= shown
    assert {name for name in shown if not any(name in text for text in [*sources, *tests])} == set()
