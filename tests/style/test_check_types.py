"""The type check sees the whole package, or says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_types import check
from tests.fixtures import Capture, Patch

pytest.importorskip("mypy")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy knows of the standard library, once for all."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tree(tmp_path: Path, cache: Path, monkeypatch: Patch) -> Path:
    """A small correct package in the layout of this one."""
    monkeypatch.setenv("MYPY_CACHE_DIR", str(cache))
    for name in ("fleetpipe", "dygraph", "static"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("def one() -> int:\n    return 1\n")
    for name in ("dygraph", "static"):
        (tmp_path / "fleetpipe" / name).symlink_to(f"../{name}")
    (tmp_path / "setup.cfg").write_text("[mypy]\n")
    return tmp_path


def test_a_correct_package_passes(tree: Path, capfd: Capture) -> None:
    assert check(tree) == 0
    assert "no issues found in 3 source files" in capfd.readouterr().out


def test_an_error_in_a_linked_folder_is_found(tree: Path, capfd: Capture) -> None:
    (tree / "dygraph" / "wrong.py").write_text("from fleetpipe import one\nx: str = one()\n")
    assert check(tree) == 1
    assert "fleetpipe/dygraph/wrong.py:2: error" in capfd.readouterr().out


def test_a_file_that_mypy_leaves_out_is_an_error(tree: Path, capfd: Capture) -> None:
    (tree / "setup.cfg").write_text("[mypy]\nexclude = hidden\n")
    (tree / "fleetpipe" / "hidden.py").write_text("x: str = 1\n")
    assert check(tree) == 1
    assert "checked 3 of 4 source files" in capfd.readouterr().out


def test_a_folder_without_an_init_file_is_an_error(tree: Path, capfd: Capture) -> None:
    (tree / "dygraph" / "sub").mkdir()
    (tree / "dygraph" / "sub" / "module.py").write_text("")
    assert check(tree) == 1
    assert "is an __init__.py missing?" in capfd.readouterr().out
