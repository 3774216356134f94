"""What users install: the whole package, importable outside the tree, and without Paddle."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launching import ROOT

SOURCES = {"fleetpipe": "fleetpipe", "dygraph": "fleetpipe/dygraph", "static": "fleetpipe/static"}
WITHOUT_PADDLE = "import sys; sys.modules.update(paddle=None, numpy=None); "

# The wheel is built once, by the worker that runs all of these.
pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built from a copy so that the tree stays clean."""
    pytest.importorskip("build.env", reason="only the environment of make test has build")
    copy = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return zipfile.Path(built)


@pytest.fixture
def installed(wheel: zipfile.Path, tmp_path: Path) -> Path:
    """A folder that holds what the wheel installs."""
    wheel.root.extractall(tmp_path)
    return tmp_path


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code outside the tree with nothing but ``path`` and the standard library to import."""
    code = f"import sys; sys.path.insert(0, {str(path)!r}); {code}"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, cwd="/", check=False, capture_output=True, text=True)


def test_every_source_file_is_in_the_wheel(wheel: zipfile.Path) -> None:
    expected = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = expected - set(wheel.root.namelist())
    assert not missing, "name their folders under packages in setup.cfg, each with an __init__.py"


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.Path) -> None:
    tops = {name.split("/")[0].split("-")[0] for name in wheel.root.namelist()}
    assert tops == {"fleetpipe"}
    assert (wheel / "fleetpipe" / "py.typed").exists()


def test_the_wheel_installs_the_command(installed: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "fleetpipe = fleetpipe.cli:main" in points.read_text()


@pytest.mark.parametrize("module", ["fleetpipe.schedules", "fleetpipe.partition"])
def test_imports_without_paddle_and_numpy(installed: Path, module: str) -> None:
    done = python(f"{WITHOUT_PADDLE} import {module} as m; print(m.__file__)", installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


@pytest.mark.parametrize("module", ["fleetpipe.dygraph", "fleetpipe.static"])
def test_the_folders_beside_fleetpipe_are_its_packages(installed: Path, module: str) -> None:
    find = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
    for root, folder in ((installed, module.replace(".", "/")), (ROOT, module.split(".")[1])):
        done = python(find, root)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(root / folder / "__init__.py")
