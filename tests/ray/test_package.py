"""What the package says where Ray is not."""

from __future__ import annotations

import sys

import pytest

import fleetpipe.ray
from fleetpipe.errors import PackageNotFound


def test_without_ray_a_name_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in fleetpipe.ray._LATE.values():
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PackageNotFound, match=r"PaddleTrainer: ray is needed(.|\n)*fleetpipe\[ray"):
        _ = fleetpipe.ray.PaddleTrainer
    assert "PaddleTrainer" in dir(fleetpipe.ray)
