"""The setting for AMD processors is made only where it is wanted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetpipe import numerics
from tests.fixtures import Patch

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
