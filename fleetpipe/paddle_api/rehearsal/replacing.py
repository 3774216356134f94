"""Installs a rehearsal of half precision around Paddle's operations, and removes it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from paddle.base import core, framework

from fleetpipe import log
from fleetpipe.aliases import DType, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import VERSION, paddle, replaced
from fleetpipe.paddle_api.amp import note_rehearsal, rehearsal_dtype
from fleetpipe.paddle_api.operations import ARITHMETIC, Function, bound_operations
from fleetpipe.paddle_api.rehearsal import rounding

_log = log.logger(__name__)
_Tensor: Any = core.eager.Tensor

#: Methods in C that run operations, beside arithmetic.
_METHODS = ("_getitem_dygraph", "_setitem_dygraph", "clone", "contiguous")
#: Operations that change no value and write in place, or cast: a CPU has them for every dtype.
_STAY = {
    *("cast", "cast_", "assign_out_", "assign_value_", "full_", "reshape_", "squeeze_"),
    *("unsqueeze_", "flatten_", "transpose_", "view_shape", "view_dtype"),
    *("share_data", "share_data_"),
}
#: The operations that methods of arithmetic run; that of ``__rmul__`` is that of ``__mul__``.
_ARITHMETIC = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
}


class _Rehearsal:
    """The replacements of an active rehearsal.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        rounded: Whether any operation had a tensor of this dtype.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.rounded = False
        self._replacements = ExitStack()

    def begin(self) -> None:
        """Replaces operations, and the functions by which ``paddle.amp`` looks at the device."""
        self._replacements.enter_context(replaced(*self._of_operations(), *self._of_amp()))

    def end(self) -> None:
        """Restores the functions that :meth:`begin` replaced."""
        self._replacements.close()

    def _of_operations(self) -> Iterator[tuple[object, str, object]]:
        for module, name, function in bound_operations():
            # A GPU adds the bias of a Linear in the kernel of its product.
            linear = function.__name__ == "linear"
            operation = "fused_gemm_epilogue" if linear else function.__name__
            if operation not in _STAY:
                yield module, name, self._operation(function, operation)
        for method in (*ARITHMETIC, *_METHODS):
            if hasattr(_Tensor, method):
                function = getattr(_Tensor, method)
                yield _Tensor, method, self._operation(function, _operation_of(method))

    def _of_amp(self) -> Iterator[tuple[object, str, object]]:
        optimizer = paddle.optimizer.Optimizer
        apply = rounding.with_master_weights(optimizer._apply_optimize)
        yield optimizer, "_apply_optimize", apply
        casts, scaling = sys.modules["paddle.amp.auto_cast"], sys.modules["paddle.amp.grad_scaler"]
        yield casts, "_dygraph_tracer", tracer_on_gpu
        yield scaling, "_dygraph_tracer", tracer_on_gpu
        for dtype in HALVES:
            yield casts, f"_is_gpu_{dtype}_supported", functools.partial(self._supports, dtype)
            # What paddle.amp.is_bfloat16_supported and Layer.bfloat16 ask.
            yield core, f"is_{dtype}_supported", functools.partial(_is_rehearsed, dtype)

    def _supports(self, dtype: str) -> bool:
        if dtype != self.dtype:
            raise ConfigError(
                f"paddle.amp is to cast to {dtype}, and the rehearsal is of {self.dtype}",
                cause=f"auto_cast or decorate without dtype={self.dtype!r}",
                fix=f"give each of them dtype={self.dtype!r}, or set "
                f"strategy.fleetpipe_configs = {{'rehearse': {dtype!r}}}",
            )
        return True

    def _operation(self, function: Function, operation: str) -> Function:
        half = HALVES[self.dtype]
        run = rounding.write if rounding.writes(operation) else rounding.compute

        @functools.wraps(function)
        def rehearsed_operation(*args: Any, **named: Any) -> Any:
            tensors = list(rounding.tensors_of((*args, *named.values())))
            if tensors and run is rounding.compute:
                goal = automatic_dtype(operation, tensors)
                if goal is not None:
                    only = tensors[0] if operation in NORMS else None
                    to_goal = functools.partial(_cast_to, goal, only)
                    args = rounding.convert(to_goal, args)
                    named = dict(zip(named, rounding.convert(to_goal, named.values())))
                    tensors = list(rounding.tensors_of((*args, *named.values())))
            if not any(tensor.dtype == half for tensor in tensors):
                return function(*args, **named)
            self.rounded = True
            return run(function, operation, half, args, named)

        return rehearsed_operation


_running: _Rehearsal | None = None


def require_rounding(dtype: str) -> None:
    """Refuses a Paddle whose casts on a CPU truncate instead of rounding, as 2.6.2's do."""
    half = HALVES[dtype]
    step = paddle.finfo(half).eps
    near = rounding.cast(paddle.to_tensor(1 + 0.75 * step, "float32"), half)
    if float(near.astype("float32")) != 1 + step:
        raise ConfigError(
            f"this Paddle cannot rehearse {dtype}: on a CPU it cuts off what a GPU rounds",
            got=f"paddlepaddle {VERSION}",
            fix="rehearse with paddlepaddle 3.3, or leave fleetpipe_configs['rehearse'] out",
        )


def rehearse(dtype: str | None) -> None:
    """Starts a rehearsal in place of the active one; None only ends that.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``.
    """
    global _running
    if dtype == rehearsal_dtype():
        return
    end_rehearsal()
    if dtype is not None:
        _running = _Rehearsal(dtype)
        _running.begin()
        note_rehearsal(dtype)


def _is_rehearsed(dtype: str, place: object) -> bool:
    return dtype == rehearsal_dtype()


def end_rehearsal() -> None:
    """Ends the active rehearsal, and warns if it has rounded nothing."""
    global _running
    ended, _running = _running, None
    note_rehearsal(None)
    if ended is None:
        return
    ended.end()
    if not ended.rounded:
        log.once(
            _log.warning,
            f"the rehearsal of {ended.dtype} had nothing to round: the script neither casts its "
            "model, as paddle.amp.decorate does, nor computes within paddle.amp.auto_cast",
        )


def _cast_to(goal: DType, only: Tensor | None, tensor: Tensor) -> Tensor:
    """Returns an operand after automatic casts; ``only``: the one operand that they change."""
    stays = only is not None and tensor is not only
    if stays or tensor.dtype not in CASTABLE or tensor.dtype == goal:
        return tensor
    return rounding.cast(tensor, goal)


def _operation_of(method: str) -> str:
    """Returns the name of the operation behind a C method."""
    bare = method.strip("_")
    return _ARITHMETIC.get(bare) or _ARITHMETIC.get(bare.removeprefix("r"), method)


_framework: ModuleType = framework
_core: ModuleType = core

HALVES: dict[str, DType] = {"float16": paddle.float16, "bfloat16": paddle.bfloat16}
#: What automatic casts change; float64 stays.
CASTABLE: tuple[DType, ...] = (*HALVES.values(), paddle.float32)
#: Operations of which automatic casts see and change the first tensor alone.
NORMS = frozenset({"batch_norm", "layer_norm", "sync_batch_norm"})


def automatic_dtype(operation: str, tensors: Sequence[Tensor]) -> DType | None:
    """Returns the dtype to which automatic casts bring an operation's operands; None: no cast.

    Args:
        operation: The name of Paddle's kernel, or its older name, which the lists use.
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
    """Returns the kernels named in one of Paddle's lists, which uses older names."""
    return listed | {_core._get_phi_kernel_name(name) for name in listed}


class _TracerOnGpu:
    """Paddle's tracer with a place that makes ``paddle.amp`` believe in a GPU."""

    _expected_place = SimpleNamespace(
        is_gpu_place=lambda: True, is_xpu_place=lambda: False, is_custom_place=lambda: False
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(_framework._dygraph_tracer(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_framework._dygraph_tracer(), name, value)


def tracer_on_gpu() -> Any:
    """Returns the tracer that ``paddle.amp`` is to use."""
    return _TracerOnGpu()
