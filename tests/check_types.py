"""Checks the whole package with ``mypy --strict``, dygraph/ and static/ included.

These two stand beside fleetpipe/ in the tree, where mypy does not see that they belong to it. So it
runs on a tree of links that has the shape of the installed package, and a run that did not check as
many files as there are is an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("dygraph", "static")


def link_tree(root: Path) -> Path:
    """Builds ``build/types/fleetpipe`` anew below ``root`` and returns ``build/types``."""
    package = root / "build" / "types" / "fleetpipe"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        link.unlink()
    inside = [entry for entry in (root / "fleetpipe").iterdir() if entry.name != "__pycache__"]
    for target in [*inside, *(root / name for name in OUTSIDE)]:
        (package / target.name).symlink_to(target)
    return package.parent


def sources(root: Path) -> list[Path]:
    """Lists the package's source files."""
    return [path for name in ("fleetpipe", *OUTSIDE) for path in (root / name).rglob("*.py")]


def check(root: Path) -> int:
    """Runs mypy on the tree below ``root``, prints what it says, and returns the exit code."""
    command = [sys.executable, "-m", "mypy", "--strict", "--package", "fleetpipe"]
    command += ["--config-file", str(root / "setup.cfg")]
    command += ["--cache-dir", str(root / ".mypy_cache")]
    tree = link_tree(root)
    environment = {**os.environ, "MYPYPATH": str(tree)}
    done = subprocess.run(
        command, cwd=tree, env=environment, check=False, capture_output=True, text=True
    )
    said = re.sub(rf"^fleetpipe/({'|'.join(OUTSIDE)})/", r"\1/", done.stdout, flags=re.MULTILINE)
    print(said + done.stderr, end="")
    counted = re.search(r"(?:in|checked) (\d+) source files?", done.stdout)
    checked, there = int(counted[1]) if counted else 0, len(sources(root))
    if checked != there:  # mypy counts a folder without an __init__.py as one more file
        print(f"error: mypy checked {checked} of {there} source files; is an __init__.py missing?")
        return done.returncode or 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(check(ROOT))
