"""What users install: the whole package, importable outside the tree, and without Paddle."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.launching import ROOT

SOURCES = {"fleetpipe": "fleetpipe", "dygraph": "fleetpipe/dygraph", "static": "fleetpipe/static"}
BESIDE = (".ci", ".github", "benchmarks", "docs", "examples", "tests")
WITHOUT_PADDLE = "import sys; sys.modules.update(paddle=None, numpy=None); "


def copied(folder: Path) -> Path:
    """Copies what a clone has to ``folder``, so that the tree stays clean."""
    pytest.importorskip("build.env", reason="only the environment of make test has build")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*SOURCES, *BESIDE):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder)
    return folder


def without_links(clone: Path) -> Path:
    """Leaves ``clone`` as Windows' git has it, a text for a link, or an archive: nothing."""
    for name in ("dygraph", "static"):
        (clone / "fleetpipe" / name).unlink(missing_ok=True)
    (clone / "fleetpipe" / "dygraph").write_text("../dygraph")
    return clone


def done_in(folder: Path, *words: str) -> None:
    """Runs this Python with ``words`` in ``folder``."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive and the wheel, which is built from that archive."""
    copy = copied(tmp_path_factory.mktemp("tree"))
    done_in(copy, "-m", "build", "--no-isolation", "--outdir", "dist")
    return copy / "dist"


@pytest.fixture(scope="session")
def wheel(built: Path) -> zipfile.Path:
    (found,) = built.glob("*.whl")
    return zipfile.Path(found)


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


def contents(wheel: zipfile.Path) -> dict[str, bytes]:
    """Returns the files of a wheel, with what they hold."""
    return {name: wheel.root.read(name) for name in wheel.root.namelist() if name[-1] != "/"}


def test_the_wheel_has_every_file_once_and_nothing_else(wheel: zipfile.Path) -> None:
    expected = [
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    names = [name for name in wheel.root.namelist() if not re.search(r"^\S+\.dist-info/|/$", name)]
    assert sorted(names) == sorted(expected), "does each folder have an __init__.py?"
    assert "fleetpipe/py.typed" in names


def test_the_source_archive_holds_the_tree_with_its_tests_and_no_links(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        files = [member for member in members if not member.isdir()]
    assert all(member.isfile() for member in files)
    found = {member.name.partition("/")[2] for member in files}
    assert {name for name in found if name.startswith("fleetpipe/dygraph")} == set()
    assert {
        str(path.relative_to(ROOT))
        for folder in (*SOURCES, *BESIDE)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } <= found
    assert {"Makefile", "SECURITY.md", "CITATION.cff", ".pre-commit-config.yaml"} <= found


def test_a_checkout_without_links_makes_the_same_wheel(wheel: zipfile.Path, tmp_path: Path) -> None:
    clone = without_links(copied(tmp_path / "clone"))
    done_in(clone, "-m", "build", "--no-isolation", "--wheel", "--outdir", "dist")
    (path,) = (clone / "dist").glob("*.whl")
    assert contents(zipfile.Path(path)) == contents(wheel)


def test_the_page_of_the_package_says_who_made_it_and_has_no_links_into_the_repository(
    installed: Path,
) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    fields, _, page = metadata.read_text(encoding="utf-8").partition("\n\n")
    assert re.findall(r"\]\((?!https?:)", page) == []
    assert "While you change something" in page, "a link keeps its text"
    said = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", fields, re.MULTILINE))
    assert set(said) == {"Source", "Documentation", "Changelog", "Issues"}
    assert {address.startswith(f"{said['Source']}/") for address in said.values()} == {False, True}
    assert "\nAuthor: The fleetpipe contributors\n" in fields
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "fleetpipe = fleetpipe.cli:main" in points.read_text()


def test_the_image_installs_extras_and_copies_files_that_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    (named,) = re.findall(r'"/opt/fleetpipe\[\$\{EXTRA\},([\w,]+)\]"', dockerfile)
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    said = re.findall(r"--build-arg (\w+)=(\S+)", dockerfile)
    assert {name for name, _ in said} == set(arguments) == {"BASE", "EXTRA"}
    chosen = {value for name, value in (*said, *arguments.items()) if name == "EXTRA"}
    assert {*named.split(","), *chosen} <= set(config["options.extras_require"])
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {*SOURCES, "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in kept for line in ignored if fnmatch(name, line)} == set()


@pytest.mark.parametrize("module", ["fleetpipe.schedules", "fleetpipe.partition"])
def test_imports_without_paddle_and_numpy(installed: Path, module: str) -> None:
    done = python(f"{WITHOUT_PADDLE} import {module} as m; print(m.__file__)", installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


@pytest.mark.parametrize("module", ["fleetpipe.dygraph", "fleetpipe.static"])
def test_the_folders_beside_fleetpipe_are_its_packages(installed: Path, module: str) -> None:
    find = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
    name = module.partition(".")[2]
    for root, folder in ((installed, f"fleetpipe/{name}"), (ROOT, name)):
        done = python(find, root)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).resolve() == root / folder / "__init__.py"


@pytest.mark.parametrize("checkout", [lambda clone: clone, without_links])
def test_an_editable_install_works_for_a_script_beside_the_clone(
    checkout: Callable[[Path], Path], tmp_path: Path
) -> None:
    """There the clone's own folder is on the path of modules, by the package's name."""
    clone, environment = checkout(copied(tmp_path / "fleetpipe")), tmp_path / "environment"
    done_in(tmp_path, "-m", "venv", "--without-pip", str(environment))
    (packages,) = environment.glob("lib/python*/site-packages")
    hook = f"from setuptools import build_meta; build_meta.build_editable({os.fspath(tmp_path)!r})"
    done_in(clone, "-c", hook)
    (editable,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(editable).extractall(packages)
    script = tmp_path / "train.py"
    script.write_text(
        "from importlib.util import find_spec\n"
        "for name in ('schedules', 'dygraph', 'static'):\n"
        "    print(find_spec(f'fleetpipe.{name}').origin)\n"
    )
    command = [str(environment / "bin" / "python"), "-E", str(script)]
    done = subprocess.run(command, cwd="/", check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = [
        clone / place / "__init__.py" for place in ("fleetpipe/schedules", "dygraph", "static")
    ]
    assert [Path(line).resolve() for line in done.stdout.splitlines()] == places
