"""What a type checker knows of a user's script against the installed package."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.launching import ROOT

pytest.importorskip("mypy", reason="only the environment of make test has mypy")

# By the cache of `make types` only the scripts are left to check.
MYPY = [
    "--strict",
    "--config-file",
    str(ROOT / "setup.cfg"),
    "--cache-dir",
    str(ROOT / ".mypy_cache"),
]


def said_of(scripts: list[Path], environment: Path) -> list[str]:
    """Returns mypy's lines about scripts of a folder, run with the packages of ``environment``."""
    python = ["--python-executable", str(environment / "bin" / "python")]
    names = [script.name for script in scripts]
    command = [sys.executable, "-m", "mypy", *MYPY, *python, *names]
    folder = scripts[0].parent
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with this environment's packages and fleetpipe as it is installed."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    return folder


def test_a_misspelt_method_is_found_and_the_first_script_is_right(
    tmp_path: Path, environment: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import paddle\n.*?)```", text, flags=re.DOTALL)
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(code)
    wrong.write_text(
        code.replace("model.train_batch(", "model.trian_batch(")
        + "reveal_type(optimizer)\n"
        + "LayerDesc(nn.functional.relu)\n"
        + "PipelineLayer(layers, topolgy=topology)\n"
    )
    said = "\n".join(said_of([right, wrong], environment))
    assert "right.py" not in said
    assert '"PipelineParallel" has no attribute "trian_batch"; maybe "train_batch"?' in said
    assert 'Revealed type is "fleetpipe.dygraph.optimizer.optimizer.PipelineOptimizer"' in said
    assert 'Argument 1 to "LayerDesc" has incompatible type' in said
    assert 'Unexpected keyword argument "topolgy" for "PipelineLayer"' in said
    assert "Found 3 errors in 1 file (checked 2 source files)" in said
