"""What decides the bits of a product on a CPU, and the setting that makes AMD CPUs fast.

The CPU wheels of Paddle bundle an MKL of 2019 that takes a slow path on AMD processors unless
``MKL_DEBUG_CPU_TYPE=5`` stands in the environment before the first product. The setting changes
the last bits of results, so a model and its reference must both run under it.
"""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "MKL_CBWR")


def prepare() -> None:
    """Sets ``MKL_DEBUG_CPU_TYPE=5`` where the CPU is AMD with AVX2 and the user set nothing.

    ``FLEETPIPE_MKL=0`` turns this off. After ``import paddle`` is still in time, after the first
    product is not.
    """
    if os.environ.get("FLEETPIPE_MKL", "1") == "0" or "MKL_DEBUG_CPU_TYPE" in os.environ:
        return
    if is_amd_with_avx2(_cpu_description()):
        os.environ["MKL_DEBUG_CPU_TYPE"] = "5"


def environment() -> dict[str, str]:
    """Returns the settings that change the bits of a result; unset ones are empty strings."""
    return {name: os.environ.get(name, "") for name in _VARIABLES}


def settings() -> dict[str, str]:
    """Returns everything that decides the bits of a result on this machine."""
    import paddle

    return {
        "paddle": paddle.version.full_version,
        "device": paddle.device.get_device().split(":")[0],
        **environment(),
    }


def is_amd_with_avx2(description: str) -> bool:
    """Tells from the text of ``/proc/cpuinfo`` whether MKL's slow path would be taken."""
    return "AuthenticAMD" in description and " avx2 " in description.replace("\n", " ")


def _cpu_description() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
