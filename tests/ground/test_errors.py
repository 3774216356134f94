"""What is refused, and what an import of the package leaves in the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle import nn

from fleetpipe import numerics
from fleetpipe.dygraph.observe.hooks import Timer
from fleetpipe.errors import ConfigError, StateError, is_file_name, is_shape, reason, require_whole
from fleetpipe.fleet.meta_parallel import TensorParallel
from fleetpipe.paddle_api.device import device_kind
from tests.fixtures import Patch
from tests.launching import ROOT, command


@pytest.mark.parametrize("value", [1, 4, np.int64(4)])
def test_whole_numbers_pass_as_such(value: Any) -> None:
    assert type(require_whole("size", value)) is int


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, -1, np.float32(1), np.bool_(True)])
def test_others_are_refused_with_what_they_are(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        require_whole("size", value, 0, where="here")
    summary, where, got, _ = str(caught.value).splitlines()
    assert summary == "size must be a whole number of at least 0"
    assert (where, got) == ("  where: here", f"  got: size={value!r}")


@pytest.mark.parametrize(
    ("sizes", "possible"),
    [
        ((), True),
        ([1] * 32, True),
        ((0, 4), True),
        ((1 << 57, 1), True),
        ([1] * 33, False),
        ([10**4000], False),
        ((0, 1 << 40, 1 << 40), False),
        ((-1,), False),
        ((True,), False),
        ("ab", False),
    ],
)
def test_sizes_that_no_tensor_has_are_not_multiplied(sizes: Any, possible: bool) -> None:
    assert is_shape(sizes) is possible


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a\0b", "\ud800", "a" * 256])
def test_what_is_no_name_of_a_file(name: str) -> None:
    assert not is_file_name(name)
    assert is_file_name("model-00001.safetensors")


def test_the_reason_of_a_missing_kernel_is_not_the_condition_that_does_not_hold() -> None:
    kernel = "(NotFound) The kernel with key (CPU, NCHW, float16) of `conv2d` is not registered."
    rest = "  [Hint: Expected one != two.] (at a.cc:1)\n  [operator < conv2d > error]"
    assert reason(RuntimeError(f"{kernel}\n{rest}")) == f"RuntimeError: {kernel}"


def test_what_needs_a_job_comes_after_fleet_init() -> None:
    if device_kind() == "cpu":
        with pytest.raises(StateError, match=r"fleet\.init"):
            TensorParallel(nn.Linear(2, 2))


def test_a_timer_starts_and_stops_by_turns() -> None:
    timer = Timer("forward")
    with pytest.raises(StateError, match="start it first"):
        timer.stop()
    timer.start()
    with pytest.raises(StateError, match="stop it first"):
        timer.start()


#: Run by their paths, in processes of their own.
SCRIPTS = ("__main__", "launch.launcher", "launch.rank_main", "launch.supervisor.pod_server")

IMPORT_ALL = f"""
import importlib, warnings
from pathlib import Path
import paddle
from paddle import _C_ops, _legacy_C_ops
from paddle.base import core

def refuse(*arguments, **named):
    raise AssertionError("an import runs an operation")

for module in (_C_ops, _legacy_C_ops):
    for name, value in list(vars(module).items()):
        if callable(value) and not name.startswith("_"):
            setattr(module, name, refuse)
warnings.simplefilter("ignore")
root, count = Path({str(ROOT / "fleetpipe")!r}), 0
for folder in (root, root / "dygraph", root / "static"):
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if name.endswith({SCRIPTS!r}) or not name.replace(".", "").isidentifier():
            continue
        try:
            importlib.import_module("fleetpipe" if name == "__init__" else "fleetpipe." + name)
        except ImportError as error:
            # Some packages that others than Paddle are needed for are not installed.
            assert error.name and error.name.split(".")[0] not in ("fleetpipe", "paddle"), error
        count += 1
# What runs no operation of these makes a tensor of a value that Python has.
print(count, core.host_memory_stat_peak_value("Allocated", 0))
"""


def test_no_import_runs_an_operation() -> None:
    done = command(sys.executable, "-c", IMPORT_ALL, timeout=120)
    assert done.returncode == 0, done.stderr
    count, allocated = map(int, done.stdout.split()[-2:])
    assert count > 300
    assert allocated == 0


AMD = "vendor_id : AuthenticAMD\nflags : fpu sse4_2 avx2 bmi2\n"
INTEL = "vendor_id : GenuineIntel\nflags : fpu sse4_2 avx2 bmi2\n"
OLD_AMD = "vendor_id : AuthenticAMD\nflags : fpu sse4_2 avx bmi2\n"


@pytest.mark.parametrize(("cpu", "wanted"), [(AMD, "5"), (INTEL, None), (OLD_AMD, None)])
def test_only_amd_with_avx2_is_set(cpu: str, wanted: str | None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **options: cpu)
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "")  # so that it is put back where it was not set
    monkeypatch.delenv("MKL_DEBUG_CPU_TYPE")
    monkeypatch.delenv("FLEETPIPE_MKL", raising=False)
    numerics.prepare()
    assert os.environ.get("MKL_DEBUG_CPU_TYPE") == wanted
    assert numerics.environment()["MKL_DEBUG_CPU_TYPE"] == (wanted or "")


def test_the_users_own_setting_and_the_switch_are_respected(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **options: AMD)
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "4")
    numerics.prepare()
    assert os.environ["MKL_DEBUG_CPU_TYPE"] == "4"
    monkeypatch.delenv("MKL_DEBUG_CPU_TYPE")
    monkeypatch.setenv("FLEETPIPE_MKL", "0")
    numerics.prepare()
    assert "MKL_DEBUG_CPU_TYPE" not in os.environ
