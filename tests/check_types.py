"""Checks the whole package with ``mypy --strict``.

A run that did not check as many files as there are is an error: mypy leaves out what it is told to,
and counts a folder without an ``__init__.py`` as one more file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def sources(root: Path) -> list[Path]:
    """Lists the package's source files, by the places where they stand in the tree."""
    folders = ("fleetpipe", "dygraph", "static")
    return [path for name in folders for path in (root / name).rglob("*.py")]


def check(root: Path) -> int:
    """Runs mypy on the package below ``root``, prints what it says, and returns the exit code."""
    command = [sys.executable, "-m", "mypy", "--strict", "--package", "fleetpipe"]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    print(done.stdout + done.stderr, end="")
    counted = re.search(r"(?:in|checked) (\d+) source files?", done.stdout)
    checked, there = int(counted[1]) if counted else 0, len(sources(root))
    if checked != there:
        print(f"error: mypy checked {checked} of {there} source files; is an __init__.py missing?")
        return done.returncode or 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(check(ROOT))
