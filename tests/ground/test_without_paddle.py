"""What needs no Paddle works without it; what needs it says which package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import ROOT, command

pytestmark = pytest.mark.no_paddle

MARK = "pytestmark = pytest.mark.no_paddle"
HIDE_PADDLE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "paddle" or name.startswith("paddle."):
            raise ModuleNotFoundError("No module named 'paddle'", name="paddle")

sys.meta_path.insert(0, Hidden())
"""


def without_paddle(code: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-c", HIDE_PADDLE + code, timeout=60)


def test_schedules_partition_and_their_commands_need_no_paddle() -> None:
    done = without_paddle(
        """
import fleetpipe.schedules as schedules
import fleetpipe.partition
from fleetpipe.cli import main
print(schedules.build("1F1B", ranks=4, micro_batches=8).simulate().bubble)
assert main(["schedule", "1F1B", "--ranks", "2", "--micro-batches", "2"]) == 0
assert not any(name.startswith("paddle") for name in sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("9\n")


def test_every_command_says_without_paddle_how_it_is_used() -> None:
    done = without_paddle(
        """
import contextlib, io
from fleetpipe.cli import COMMANDS, main
for name in [command.name for command in COMMANDS]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            code = main([name, "--help"])
        except SystemExit as ended:
            code = ended.code
    assert not code and f"fleetpipe {name}" in shown.getvalue(), (name, code)
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["fleetpipe.fleet", "fleetpipe.dygraph", "fleetpipe.static", "fleetpipe.parity"]
)
def test_the_rest_names_both_packages(module: str) -> None:
    done = without_paddle(f"import {module}")
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("PaddleNotFound") :]
    assert "pip install paddlepaddle (CPU) or pip install paddlepaddle-gpu (GPU)" in last


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    done = without_paddle("import fleetpipe; print(*dir(fleetpipe))")
    assert done.stdout.split() == [
        *("CheckpointManager", "Model", "SplitPoint", "__version__", "callbacks", "explain"),
        *("generate", "install", "load_checkpoint", "load_single", "locate", "model_hash"),
        *("pipe_split", "pipeline", "plan", "resume"),
    ]


def test_tests_that_import_no_paddle_do_not() -> None:
    marked = [file for file in (ROOT / "tests").rglob("*.py") if MARK in file.read_text("utf-8")]
    files = [
        file
        for path in marked
        for file in (path.parent.rglob("*.py") if path.name == "__init__.py" else [path])
    ]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert len(names) > 30
    done = without_paddle(f"import importlib\nfor name in {names}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr
