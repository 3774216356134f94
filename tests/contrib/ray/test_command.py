"""What ``fleetpipe launch --ray`` and ``fleetpipe.contrib.ray`` say where Ray is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fleetpipe.contrib.ray
from fleetpipe.cli import main
from fleetpipe.errors import PackageNotFound
from tests.fixtures import Capture, Patch


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="ascii")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fleetpipe.contrib.ray.launch", raising=False)
    assert main(["launch", "--ray", "local", str(script)]) == 2
    told = capsys.readouterr().err
    assert "fleetpipe launch --ray needs Ray Train, which is not installed" in told
    assert "pip install 'fleetpipe[ray]'" in told


def test_without_ray_a_name_says_how_to_install_it(monkeypatch: Patch) -> None:
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in fleetpipe.contrib.ray._LATE.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PackageNotFound, match=r"PaddleTrainer: ray is needed(.|\n)*fleetpipe\[ray"):
        _ = fleetpipe.contrib.ray.PaddleTrainer
    assert "PaddleTrainer" in dir(fleetpipe.contrib.ray)
