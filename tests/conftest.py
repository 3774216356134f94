"""What all tests share: one thread, seeds, versions in the header, jobs of several processes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.launching import Finished, run

# More threads would change the bits of a product. Paddle reads this once, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machine's load must not decide whether a property holds.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_report_header() -> str:
    """Names the Paddle that is installed, without importing it."""
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            return (
                f"{name} {metadata.version(name)}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
            )
        except metadata.PackageNotFoundError:
            continue
    return "no Paddle"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that launch jobs, and keeps all of these on one worker, one after another."""
    for item in items:
        if "launch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Gives every test the same random numbers, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if hasattr(sys.modules.get("paddle"), "seed"):
        sys.modules["paddle"].seed(0)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Finished]:
    """`tests.launching.run` with the test's own folder for logs."""
    return partial(run, folder=tmp_path)
