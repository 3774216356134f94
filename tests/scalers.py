"""A ``GradScaler`` that is on, where Paddle would switch it off: on CPU, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle
from paddle.amp import grad_scaler


def enabled_scaler(**arguments: Any) -> Any:
    """Makes a scaler as on a GPU; its kernels run on CPU as well."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    tracer = SimpleNamespace(_expected_place=place)
    with mock.patch.object(grad_scaler, "_dygraph_tracer", return_value=tracer):
        return paddle.amp.GradScaler(**arguments)


@contextmanager
def half_precision() -> Iterator[None]:
    """Within it Paddle believes that losses are float16, as dynamic scaling requires."""
    state: Any = grad_scaler.amp_global_state()
    before, state.amp_dtype = state.amp_dtype, "float16"
    try:
        yield
    finally:
        state.amp_dtype = before
