"""To which dtype ``auto_cast`` brings an operation: what Paddle's C++ does for tensors of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from paddle.base import core, framework

from fleetpipe.aliases import DType, Tensor
from fleetpipe.paddle_api import paddle

_framework: ModuleType = framework
_core: ModuleType = core

HALVES: dict[str, DType] = {"float16": paddle.float16, "bfloat16": paddle.bfloat16}
#: What automatic casts change; float64 stays.
CASTABLE: tuple[DType, ...] = (*HALVES.values(), paddle.float32)
#: Operations of which automatic casts see and change the first tensor alone.
NORMS = frozenset({"batch_norm", "layer_norm", "sync_batch_norm"})


def automatic_dtype(operation: str, tensors: Sequence[Tensor]) -> DType | None:
    """Returns the dtype to which the operands of an operation are cast now; None: they stay.

    Args:
        operation: The name of Paddle's kernel, or the older one that lists have.
        tensors: The operands.
    """
    tracer = _framework._dygraph_tracer()
    level = tracer._amp_level.name
    if level == "O0":
        return None
    half = HALVES[tracer._amp_dtype]
    white, black = (_kernels_of(frozenset(names)) for names in tracer._get_amp_op_list())
    if level == "O2" and not tracer._use_promote:
        return paddle.float32 if operation in black else half
    if operation in white:
        return half
    if operation in black or level == "OD":
        return paddle.float32
    seen = tensors[:1] if operation in NORMS else tensors
    return paddle.float32 if any(tensor.dtype == paddle.float32 for tensor in seen) else half


@functools.lru_cache(maxsize=16)
def _kernels_of(listed: frozenset[str]) -> frozenset[str]:
    """Returns the kernels of a list of Paddle's, which has the names of older versions."""
    return listed | {_core._get_phi_kernel_name(name) for name in listed}


class _TracerOnGpu:
    """Paddle's tracer, with a place of which ``paddle.amp`` believes that it is a GPU's."""

    _expected_place = SimpleNamespace(
        is_gpu_place=lambda: True, is_xpu_place=lambda: False, is_custom_place=lambda: False
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(_framework._dygraph_tracer(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_framework._dygraph_tracer(), name, value)


def tracer_on_gpu() -> Any:
    """Returns what ``paddle.amp`` is to take for its tracer."""
    return _TracerOnGpu()
