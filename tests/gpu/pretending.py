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
#: What is left out of runs with the plugin, by reason: where tests begin so.
LEFT_OUT = {
    "is of operations of our own that CPUs have, or of what no CPU has a kernel for": (
        *("contrib/fast_leaves/test_fast_leaves.py", "dygraph/backward/test_lookup.py"),
        *("contrib/experts", "dygraph/tensor_parallel", "engine/test_hot_path.py"),
        "dygraph/layers/test_refusals.py::test_a_layer_that_the_device_has_no_kernel_for",
    ),
    "is of mixed precision, in which CPUs compute in float32": (
        *("dygraph/train/test_rehearsal.py", "fit/test_preparing.py::test_on_a_cpu_mixed"),
        "dygraph/optimizer/test_optimizer.py::test_mixed_precision_by_strategy_is_float32",
        "dygraph/optimizer/test_clip_and_scaler.py::test_a_scaler_on_cpu_trains_as_none",
    ),
    "measures the host's memory or time": (
        "contrib/shadow/test_shadow.py::test_a_model_that_finds_no_room",
        *("fit/test_callbacks.py", "engine/test_step_meter.py"),
        "engine/test_observer.py::test_a_small_message_is_one_send",
        "dygraph/observe/test_profile.py::test_a_process_takes_more_than_its_tensors",
        "dygraph/observe/test_profile.py::test_ranks_that_share_processors",
    ),
    "has Paddle's own code ask for a card": ("fit/test_model.py", "fit/test_plain_model.py"),
}
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
        (cuda, "memory_reserved", lambda device=None: _allocated("current_value")),
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


def pytest_report_header() -> list[str]:
    """Says what is left out."""
    return [f"left out of a run that pretends: {why}: {at}" for why, at in LEFT_OUT.items()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what a CPU that pretends cannot show."""
    names = tuple(f"tests/{name}" for names in LEFT_OUT.values() for name in names)
    left_out = [item for item in items if item.nodeid.startswith(names)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
