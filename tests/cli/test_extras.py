"""Packages that only some parts need: the line that installs each, before any rank starts."""

from __future__ import annotations

import configparser
import shlex
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from fleetpipe import extras
from fleetpipe.cli import main
from fleetpipe.errors import ConfigError, PackageNotFound
from fleetpipe.extras import needed_for
from tests.launching import ROOT

DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "ray": "ray[train]==2.60.*",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hides a package from imports and from those who look for it."""

    def hidden(name: str) -> ModuleSpec | None:
        return None if name == package else find_spec(name)

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(extras, "find_spec", hidden)


def test_every_line_installs_the_package_it_stands_for() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for name, line in extras.INSTALLED_BY.items():
        *pip, what = shlex.split(line)
        assert pip == ["pip", "install"]
        if what.startswith("fleetpipe["):
            inside = config["options.extras_require"][what[len("fleetpipe[") : -1]].split()
            assert DISTRIBUTIONS.get(name, name) in inside


def test_an_import_of_what_is_missing_says_its_purpose_and_the_line() -> None:
    with pytest.raises(PackageNotFound, match="a page: yaml is") as caught, needed_for("a page"):
        raise ModuleNotFoundError("no", name="yaml.cyaml")
    assert isinstance(caught.value, (ConfigError, ImportError))
    assert "what to do: pip install 'fleetpipe[project]'" in str(caught.value)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"), needed_for("nothing"):
        raise ModuleNotFoundError("elsewhere", name="another")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import yaml", ["yaml"]),
        ("import os, yaml.cyaml", ["yaml"]),
        ("from yaml import safe_load", ["yaml"]),
        ("import beside", ["yaml"]),
        (
            "from fleetpipe.extras import needed_for\nwith needed_for('x'):\n    import yaml",
            ["yaml"],
        ),
        # What may run otherwise, or be found elsewhere, is left to Python.
        ("try:\n    import yaml\nexcept ImportError:\n    yaml = None", []),
        ("def late():\n    import yaml", []),
        ("import sys\nsys.path.append('/libraries')\nimport yaml", []),
        ("import nowhere", []),
        ("import yaml (", []),
    ],
)
def test_what_a_script_cannot_do_without(
    script: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "yaml")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "beside.py").write_text("import train, yaml")
    assert extras.missing(tmp_path / "train.py") == found
    (tmp_path / "yaml.py").touch()
    assert extras.missing(tmp_path / "train.py") == []


@pytest.mark.parametrize("command", ["run", "launch", "parity", "profile"])
def test_a_script_without_its_data_is_refused_before_any_rank_starts(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without(monkeypatch, "sklearn")
    (tmp_path / "train.py").write_text("from sklearn.datasets import load_digits")
    assert main([command, str(tmp_path / "train.py")]) == 2
    told = capsys.readouterr().err
    assert "train.py imports sklearn, which is not installed: pip install scikit-learn" in told


def test_the_examples_need_no_package_but_paddle_and_fleetpipe() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert [name for path in examples for name in extras._imports(path, {path})] == []
