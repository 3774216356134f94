"""What an import leaves in the process: no operation was run, and the setting for AMD's is made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fleetpipe import numerics
from tests.fixtures import Patch
from tests.launching import ROOT, command

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
    assert count > 500
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
