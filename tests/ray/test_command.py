"""What ``fleetpipe launch --ray`` says where it cannot begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleetpipe.cli import main


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="ascii")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fleetpipe.ray.launch", raising=False)
    assert main(["launch", "--ray", "local", str(script)]) == 2
    told = capsys.readouterr().err
    assert "fleetpipe launch --ray needs Ray Train, which is not installed" in told
    assert "pip install 'fleetpipe[ray]'" in told
