"""A CPU that says it is a GPU: all branches of fleetpipe for GPUs run, and the CPU computes.

Nothing that this Paddle lacks is stood in for. Tests of tests/gpu pretend by a fixture. As a plugin
of pytest (``-p tests.gpu.pretending``) this has any tests pretend, from their first import on.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

# More threads would change the bits of a product. Paddle reads this once, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import paddle
import pytest
from paddle.base import core as _core

core: Any = _core
_PROPERTIES = SimpleNamespace(
    name="pretended", major=8, minor=0, total_memory=80 << 30, multi_processor_count=108
)


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Has this process's CPU say that it is a GPU, until ``patch`` is undone."""
    cuda = paddle.device.cuda
    answers: list[tuple[Any, str, Any]] = [
        (paddle.device, "get_device", lambda: "gpu:0"),
        (paddle, "get_device", lambda: "gpu:0"),
        (paddle.device, "synchronize", lambda device=None: None),
        (cuda, "synchronize", lambda device=None: None),
        (cuda, "memory_allocated", lambda device=None: _allocated("current_value")),
        (cuda, "max_memory_allocated", lambda device=None: _allocated("peak_value")),
        (cuda, "reset_max_memory_allocated", lambda device=None: _allocated("reset_peak_value")),
        (cuda, "get_device_properties", lambda device=None: _PROPERTIES),
        (cuda, "get_device_capability", lambda device=None: (8, 0)),
        (cuda, "get_device_name", lambda device=None: "pretended"),
        (cuda, "device_count", lambda: 1),
    ]
    for owner, name, answer in answers:
        if hasattr(owner, name):
            patch.setattr(owner, name, answer)
    moved = paddle.Tensor.to
    patch.setattr(paddle.Tensor, "to", lambda x, *to, **by: moved(x, *map(_on_cpu, to), **by))


def _allocated(figure: str) -> int:
    return int(getattr(core, f"host_memory_stat_{figure}")("Allocated", 0) or 0)


def _on_cpu(argument: Any) -> Any:
    is_gpu = isinstance(argument, str) and argument.startswith("gpu")
    return "cpu" if is_gpu else argument


def pytest_configure() -> None:
    """Pretends for the whole run."""
    pretend(pytest.MonkeyPatch())
