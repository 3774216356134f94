"""The paths by which users import extras lead to one module each, not to a second copy."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from fleetpipe.contrib import SHORTER

#: Ray is not there beside each Paddle.
pytestmark = pytest.mark.once

ORDERS = (
    "import fleetpipe.ray, fleetpipe.contrib.ray",
    "import fleetpipe.contrib.ray, fleetpipe.ray",
    "from fleetpipe import ray; import fleetpipe.ray, fleetpipe.contrib.ray",
)


@pytest.mark.parametrize("shorter", SHORTER)
def test_a_shorter_path_is_the_module_itself(shorter: str) -> None:
    module = importlib.import_module(f"fleetpipe.contrib.{SHORTER[shorter]}")
    assert importlib.import_module(shorter) is module
    assert pkgutil.resolve_name(shorter) is module
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__
    for inner in pkgutil.iter_modules(getattr(module, "__path__", [])):
        name = f"{module.__name__}.{inner.name}"
        assert importlib.import_module(f"{shorter}.{inner.name}") is importlib.import_module(name)


@pytest.mark.parametrize("order", ORDERS)
def test_whichever_comes_first(order: str) -> None:
    line = f"{order}; assert fleetpipe.ray is fleetpipe.contrib.ray"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)


def test_what_is_not_there_is_an_import_error_by_its_own_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fleetpipe\.ray\.nowhere"):
        importlib.import_module("fleetpipe.ray.nowhere")
