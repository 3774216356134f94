"""Tries a release as a stranger installs it: into empty environments, away from the repository.

    python -m tests.packaging.release [--pythons python3.10 python3.12 ..] [--extras]

builds the source archive and the wheel in ``dist``, then makes an environment for each Python,
installs the wheel with Paddle (for the first Python the archive too), and runs ``pip check``,
``fleetpipe --version``, ``doctor``, the script of README in one process, on two ranks and beside
its single-device model, and a new project with its test: some two minutes. ``--extras`` installs
each extra by itself with the first Python. A table of what passed; exits 1 where anything did not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
#: Another version of Paddle than ``cpu``'s, or one that needs ``cpu``'s beside it.
NOT_ALONE = ("gpu", "cpu")
LIMIT = 900


def readme_script() -> str:
    """Returns the first script of README, which is a program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(str(block) for block in blocks if "train_batch" in block)


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the source archive, and the wheel from it; returns both."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


class Environment:
    """An empty environment of one Python, in a folder away from the repository."""

    def __init__(self, python: str, folder: Path) -> None:
        self.name = python
        self.folder = folder
        self.failures: list[str] = []
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.bin = folder / "venv" / "bin"

    def run(self, *words: str, folder: Path | None = None) -> None:
        """Runs a program of the environment, and says how it went."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment = {**kept, "PATH": f"{self.bin}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        begin = time.monotonic()
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=folder or self.folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        shown = " ".join(Path(word).name for word in words)
        verdict = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
        print(f"{self.name:12} {time.monotonic() - begin:6.1f} s  {verdict:13} {shown}", flush=True)
        if done.returncode:
            self.failures.append(
                f"{self.name}: {shown}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )

    def install(self, *requirements: str) -> None:
        """Installs packages, and asks pip whether all fit one another."""
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
        self.run("pip", "check")

    def try_out(self) -> None:
        """Does what a newcomer does first."""
        self.run("fleetpipe", "--version")
        self.run("fleetpipe", "schedule", "1F1B", "--ranks", "2", "--micro-batches", "4")
        (self.folder / "train.py").write_text(readme_script())
        self.run("python", "train.py")
        self.run("fleetpipe", "run", "--nproc", "2", "train.py")
        self.run("fleetpipe", "parity", "train.py")
        self.run("fleetpipe", "doctor")
        self.run("fleetpipe", "new", "project")
        self.run("pip", "install", "--quiet", "fleetpipe[project]")
        self.run("python", "-m", "pytest", "-q", folder=self.folder / "project")


def extras() -> list[str]:
    """Returns the extras that can be installed beside a Paddle for CPUs."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return [name for name in settings["options.extras_require"] if name not in NOT_ALONE]


def main() -> int:
    """Builds, installs and runs; prints what failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--pythons", nargs="+", default=[p for p in PYTHONS if shutil.which(p)])
    options.add_argument("--extras", action="store_true", help="each extra too, by itself")
    chosen = options.parse_args()
    archive, wheel = build(ROOT / "dist")
    failures: list[str] = []
    for number, python in enumerate(chosen.pythons):
        wanted = [wheel] if number else [wheel, archive]
        for package in wanted:
            with tempfile.TemporaryDirectory() as place:
                environment = Environment(python, Path(place))
                environment.install(f"fleetpipe[cpu] @ {package.as_uri()}")
                environment.try_out()
                failures += environment.failures
    for extra in extras() if chosen.extras else ():
        with tempfile.TemporaryDirectory() as place:
            environment = Environment(chosen.pythons[0], Path(place))
            environment.install(f"fleetpipe[{extra}] @ {wheel.as_uri()}")
            environment.run("fleetpipe", "--version")
            failures += environment.failures
    print("\n".join(failures))
    print(f"{wheel.name}: {'PASSED' if not failures else f'{len(failures)} FAILED'}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
