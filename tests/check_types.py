"""Checks the whole package with ``mypy --strict``, as each system that it runs on would.

A run that did not check as many files as there are is an error: mypy leaves out what it is told to,
and counts a folder without an ``__init__.py`` as one more file.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("linux", "darwin", "win32")


def sources(root: Path) -> list[Path]:
    """Lists the package's source files and stubs, by the places where they stand in the tree."""
    folders = ("fleetpipe", "dygraph", "static")
    kinds = ("*.py", "*.pyi")
    return [path for name in folders for kind in kinds for path in (root / name).rglob(kind)]


@cache
def tree(file: Path) -> ast.Module:
    """What a source file says; each is parsed once for all tests of a process."""
    return ast.parse(file.read_text(encoding="utf-8"))


def check(root: Path, platform: str = sys.platform) -> int:
    """Runs mypy on the package below ``root``, prints what it says, and returns the exit code."""
    command = [sys.executable, "-m", "mypy", "--strict", "--package", "fleetpipe"]
    # A cache for each: a run for another platform would make nothing of it.
    cache = Path(os.environ.get("MYPY_CACHE_DIR", ".mypy_cache"), platform)
    command += ["--platform", platform, "--cache-dir", str(cache)]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    print(f"{platform}: {done.stdout}{done.stderr}", end="")
    counted = re.search(r"(?:in|checked) (\d+) source files?", done.stdout)
    checked, there = int(counted[1]) if counted else 0, len(sources(root))
    if checked != there:
        print(f"error: mypy checked {checked} of {there} source files; is an __init__.py missing?")
        return done.returncode or 1
    return done.returncode


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as threads:
        sys.exit(max(threads.map(lambda platform: check(ROOT, platform), PLATFORMS)))
