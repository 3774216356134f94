"""Reads and sets the settings that change the bits of results, and the one that AMD CPUs need.

The CPU wheels of Paddle bundle an MKL of 2019 that takes a slow path on AMD processors unless
``MKL_DEBUG_CPU_TYPE=5`` is in the environment before the first product. The setting changes the
last bits of results, so a model and its reference must both run under it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: The environment variables that change the bits of a result: on any device, and on GPUs alone.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "MKL_CBWR")
_GPU_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
#: Flags of Paddle's with which a GPU adds up in one order in cuDNN's kernels and in the gradient of
#: Embedding. Paddle refuses to choose kernels by their time (exhaustive search) at the same time.
_DETERMINISTIC_FLAGS = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_embedding_deterministic": 1,
}


def prepare() -> None:
    """Sets ``MKL_DEBUG_CPU_TYPE=5``, for speed, on an AMD CPU with AVX2, unless it is set.

    ``FLEETPIPE_MKL=0`` turns this off. It has effect after ``import paddle`` too, but not after the
    first product.
    """
    if os.environ.get("FLEETPIPE_MKL", "1") == "0" or "MKL_DEBUG_CPU_TYPE" in os.environ:
        return
    processor = cpu_description()
    if "AuthenticAMD" in processor and " avx2 " in processor.replace("\n", " "):
        os.environ["MKL_DEBUG_CPU_TYPE"] = "5"


def repeat_bits() -> None:
    """Makes a GPU compute the same bits in every run, as far as Paddle can; a CPU always does.

    cuBLAS reads its variable when it is first used.
    """
    import paddle

    if paddle.device.get_device() == "cpu":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in _DETERMINISTIC_FLAGS.items():
        with suppress(ValueError):  # a version of Paddle without this flag
            paddle.set_flags({name: value})


def environment() -> dict[str, str]:
    """Returns the environment variables that change the bits of a result; "" for unset ones."""
    return {name: os.environ.get(name, "") for name in _VARIABLES}


def settings() -> dict[str, str]:
    """Returns what determines the bits of results: Paddle's version, device, environment."""
    import paddle

    device = paddle.device.get_device().split(":")[0]
    facts = {"paddle": paddle.version.full_version, "device": device, **environment()}
    if device != "cpu":
        facts.update((name, os.environ.get(name, "")) for name in _GPU_VARIABLES)
    return facts


def cpu_description() -> str:
    """Returns the text of ``/proc/cpuinfo``; "" on a system without it."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
