"""Imitates on a CPU how Paddle computes in bfloat16 or float16 on a GPU.

Below, "half precision" (``half``) means one of these dtypes. A CPU holds such tensors and casts
them, but lacks most of their kernels, and ``paddle.amp`` does nothing there. While a *rehearsal* is
on, ``paddle.amp`` takes the CPU for a GPU, and an operation on such tensors runs in float32 and
rounds its result. The casts around it are operations as well, so that autograd rounds the gradients
too. It works on 3.3.x; the casts of 2.6.2 cut off digits on a CPU, and a rehearsal is refused.

Results have the dtypes of Paddle's GPU kernels: that of the first floating-point tensor, the widest
if operands are promoted, and float32 for the statistics that a normalization returns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from paddle import _C_ops
from paddle.base import core, framework

from fleetpipe import log
from fleetpipe.aliases import DType, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import VERSION, paddle, replaced
from fleetpipe.paddle_api.amp import note_rehearsal, rehearsal_dtype
from fleetpipe.paddle_api.eager_operations import ARITHMETIC, Function, bound_operations

__all__ = [
    "end_rehearsal",
    "rehearse",
    "require_rounding",
]


_Tensor: Any = core.eager.Tensor
#: Paddle's own operations, which a rehearsal replaces elsewhere.
cast: Callable[[Tensor, DType], Tensor] = _C_ops.cast
_assign: Callable[[Tensor], Tensor] = _C_ops.assign
_write: Callable[[Tensor, Tensor], Tensor] = _C_ops.assign_out_

Arguments = tuple[Any, ...]
#: Operations that promote their operands to the widest dtype.
_PROMOTING = frozenset(
    {"add", "subtract", "multiply", "divide", "remainder", "floor_divide", "elementwise_pow"}
)


#: Operations that write into an argument and whose names do not end in ``_``.
_WRITING = ("_setitem_dygraph", "check_finite_and_unscale")

#: The master weights of the optimizer that steps now, by the names of the parameters.
_master_weights: Mapping[str, Tensor] = {}

_log = log.logger(__name__)

#: Further methods in C that run operations.
_METHODS = ("_getitem_dygraph", "_setitem_dygraph", "clone", "contiguous")
#: Operations that are not replaced: casts, and writes in place without a computation, which a CPU
#: has for every dtype.
_UNCHANGED = {
    *("cast", "cast_", "assign_out_", "assign_value_", "full_", "reshape_", "squeeze_"),
    *("unsqueeze_", "flatten_", "transpose_", "view_shape", "view_dtype"),
    *("share_data", "share_data_"),
}
#: The operation of each arithmetic method; ``__rmul__`` has that of ``__mul__``.
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

#: The active rehearsal.
_running: _Rehearsal | None = None

_framework: ModuleType = framework
_core: ModuleType = core

#: The dtypes of half precision, by name.
HALVES: dict[str, DType] = {"float16": paddle.float16, "bfloat16": paddle.bfloat16}
#: The dtypes that automatic casts change; float64 stays.
CASTABLE: tuple[DType, ...] = (*HALVES.values(), paddle.float32)
#: Operations of which automatic casts consider and change the first tensor alone.
NORMS = frozenset({"batch_norm", "layer_norm", "sync_batch_norm"})


def writes_in_place(operation: str) -> bool:
    """Returns whether an operation writes into one of its arguments."""
    return operation.endswith("_") or operation in _WRITING


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of an operation, also those in lists."""
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, _Tensor))


def map_tensors(change: Callable[[Tensor], Tensor], values: Iterable[Any]) -> Arguments:
    """Returns the arguments of an operation with each tensor, also in lists, changed."""

    def changed(value: Any) -> Any:
        """Returns an argument with its tensor, or those in its list, changed."""
        if isinstance(value, _Tensor):
            return change(value)
        if isinstance(value, (list, tuple)):
            return type(value)(change(v) if isinstance(v, _Tensor) else v for v in value)
        return value

    return tuple(changed(value) for value in values)


def compute_in_float32(
    function: Function, operation: str, half: DType, args: Arguments, named: Mapping[str, Any]
) -> Any:
    """Runs an operation in float32, and rounds the results that a GPU has in half precision.

    Args:
        function: The operation.
        operation: Its name.
        half: The dtype of half precision.
        args: The positional arguments.
        named: The keyword arguments.
    """
    rounds = _has_half_results(operation, half, (*args, *named.values()))
    to_float32 = functools.partial(_cast_to_float32, half)
    keywords = dict(zip(named, map_tensors(to_float32, named.values())))
    result = function(*map_tensors(to_float32, args), **keywords)
    return _round_results(result, operation, half) if rounds else result


def write_in_float32(
    function: Function, operation: str, half: DType, args: Arguments, named: Mapping[str, Any]
) -> Any:
    """Runs an operation that writes into its arguments on float32 copies, and rounds these back.

    For a parameter that an optimizer steps, the copy is its master weight, if it has one. The
    arguments are as for :func:`compute_in_float32`.
    """
    copies = _Copies(half, list(tensors_of(args)))
    float32_args = map_tensors(copies.of, args)
    result = function(*float32_args, **named)
    if result is None:
        results = float32_args[:1]
    else:
        results = result if isinstance(result, tuple) else (result,)
    in_lists = tensors_of(value for value in float32_args if isinstance(value, list))
    copies.write_back((*in_lists, *tensors_of(results)))
    if result is None:
        return None
    first, *rest = map(copies.original, results)
    if first is results[0] and all(first is not value for value in float32_args):
        first = _round_results(first, operation, half)
    return (first, *rest) if isinstance(result, tuple) else first


def with_master_weights(apply: Function) -> Function:
    """Returns a wrapper of an optimizer's method in which master weights are the float32 copies."""

    @functools.wraps(apply)
    def apply_optimize(optimizer: Any, *args: Any, **named: Any) -> Any:
        """Calls the method while master weights serve as float32 copies."""
        global _master_weights
        before, _master_weights = _master_weights, optimizer._master_weights
        try:
            return apply(optimizer, *args, **named)
        finally:
            _master_weights = before

    return apply_optimize


class _Copies:
    """The float32 copies of those of an operation's arguments that are in half precision."""

    def __init__(self, half: DType, tensors: list[Tensor]) -> None:
        """Looks up the master weights of the arguments ``tensors``; :meth:`of` makes the copies."""
        self._half = half
        self._master_weights = {
            t.name: _master_weights[t.name] for t in tensors if t.name in _master_weights
        }
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the float32 copy of an argument in half precision; any other one unchanged."""
        if tensor.dtype != self._half:
            # Some kernels of CPUs step the parameter alone, others look at both.
            is_master = any(tensor is master for master in self._master_weights.values())
            return _assign(tensor) if is_master else tensor
        for original, copy in self._pairs.values():
            if original is tensor:
                return copy
        copy = self._master_weights.get(tensor.name)
        copy = cast(tensor, paddle.float32) if copy is None else copy
        self._pairs[id(copy)] = (tensor, copy)
        return copy

    def original(self, value: Any) -> Any:
        """Returns the argument whose copy is ``value``; else ``value`` itself."""
        return self._pairs[id(value)][0] if id(value) in self._pairs else value

    def write_back(self, values: Iterable[Tensor]) -> None:
        """Rounds the copies among ``values`` back into their originals."""
        for key in {id(value) for value in values} & self._pairs.keys():
            tensor, copy = self._pairs[key]
            _write(cast(copy, self._half), tensor)


def _has_half_results(operation: str, half: DType, values: Arguments) -> bool:
    """Returns whether a GPU has the results of an operation on ``values`` in half precision."""
    if any(isinstance(value, type(paddle.float32)) for value in values):
        # A dtype among the arguments is that of the result.
        return False
    floats = [tensor for tensor in tensors_of(values) if tensor.is_floating_point()]
    if operation in _PROMOTING:
        # A tensor of no dimension counts where there are no others.
        floats = [tensor for tensor in floats if tensor.ndim] or floats
        return all(tensor.dtype == half for tensor in floats)
    return bool(floats[0].dtype == half)


def _cast_to_float32(half: DType, tensor: Tensor) -> Tensor:
    """Returns a tensor cast to float32 if its dtype is ``half``, else the tensor itself."""
    return cast(tensor, paddle.float32) if tensor.dtype == half else tensor


def _round_results(result: Any, operation: str, half: DType) -> Any:
    """Returns the result or results of an operation, with float32 rounded to half precision."""
    if isinstance(result, _Tensor):
        return cast(result, half) if result.dtype == paddle.float32 else result
    if not isinstance(result, (tuple, list)):
        return result
    # The further results of a normalization are statistics.
    count = 1 if "norm" in operation else len(result)
    rounded = [_round_results(item, operation, half) for item in result[:count]]
    return type(result)([*rounded, *result[count:]])


class _Rehearsal:
    """A rehearsal: the replacements of Paddle's operations that it makes.

    Attributes:
        dtype: ``"bfloat16"`` or ``"float16"``.
        rounded: Whether some operation had a tensor of this dtype.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.rounded = False
        self._replacements = ExitStack()

    def begin(self) -> None:
        """Replaces operations, and the functions by which ``paddle.amp`` looks at the device."""
        self._replacements.enter_context(
            replaced(*self._operation_replacements(), *self._amp_replacements())
        )

    def end(self) -> None:
        """Restores the functions that :meth:`begin` replaced."""
        self._replacements.close()

    def _operation_replacements(self) -> Iterator[tuple[object, str, object]]:
        """Yields the module or class, name and replacement of each operation."""
        for module, name, function in bound_operations():
            # A GPU adds the bias of a Linear in the kernel of its product.
            is_linear = function.__name__ == "linear"
            operation = "fused_gemm_epilogue" if is_linear else function.__name__
            if operation not in _UNCHANGED:
                yield module, name, self._rehearsed_operation(function, operation)
        for method in (*ARITHMETIC, *_METHODS):
            if hasattr(_Tensor, method):
                function = getattr(_Tensor, method)
                yield _Tensor, method, self._rehearsed_operation(function, _operation_of(method))

    def _amp_replacements(self) -> Iterator[tuple[object, str, object]]:
        """Yields the owner, name and replacement of the functions that mixed precision uses."""
        optimizer = paddle.optimizer.Optimizer
        apply = with_master_weights(optimizer._apply_optimize)
        yield optimizer, "_apply_optimize", apply
        casts, scaling = sys.modules["paddle.amp.auto_cast"], sys.modules["paddle.amp.grad_scaler"]
        yield casts, "_dygraph_tracer", _TracerOnGpu
        yield scaling, "_dygraph_tracer", _TracerOnGpu
        for dtype in HALVES:
            yield casts, f"_is_gpu_{dtype}_supported", functools.partial(self._require_dtype, dtype)
            # Called by paddle.amp.is_bfloat16_supported and Layer.bfloat16.
            yield core, f"is_{dtype}_supported", functools.partial(_is_rehearsed, dtype)

    def _require_dtype(self, dtype: str) -> bool:
        """Returns True if casts are to the rehearsal's dtype; refuses another dtype."""
        if dtype != self.dtype:
            raise ConfigError(
                f"paddle.amp is to cast to {dtype}, and the rehearsal is of {self.dtype}",
                cause=f"auto_cast or decorate without dtype={self.dtype!r}",
                fix=f"give each of them dtype={self.dtype!r}, or set "
                f"strategy.fleetpipe_configs = {{'rehearse': {dtype!r}}}",
            )
        return True

    def _rehearsed_operation(self, function: Function, operation: str) -> Function:
        """Returns the replacement of an operation, whose name is ``operation``."""
        half = HALVES[self.dtype]
        run = write_in_float32 if writes_in_place(operation) else compute_in_float32

        @functools.wraps(function)
        def rehearsed_operation(*args: Any, **named: Any) -> Any:
            """Casts the tensors as a GPU would, and rounds the results to half precision."""
            tensors = list(tensors_of((*args, *named.values())))
            if tensors and run is compute_in_float32:
                goal = automatic_dtype(operation, tensors)
                if goal is not None:
                    only = tensors[0] if operation in NORMS else None
                    to_goal = functools.partial(_cast_to, goal, only)
                    args = map_tensors(to_goal, args)
                    named = dict(zip(named, map_tensors(to_goal, named.values())))
                    tensors = list(tensors_of((*args, *named.values())))
            if not any(tensor.dtype == half for tensor in tensors):
                return function(*args, **named)
            self.rounded = True
            return run(function, operation, half, args, named)

        return rehearsed_operation


def require_rounding(dtype: str) -> None:
    """Refuses a Paddle whose casts on a CPU truncate instead of rounding, as 2.6.2's do."""
    half = HALVES[dtype]
    step = paddle.finfo(half).eps
    near = cast(paddle.to_tensor(1 + 0.75 * step, "float32"), half)
    if float(near.astype("float32")) != 1 + step:
        raise ConfigError(
            f"this Paddle cannot rehearse {dtype}: on a CPU it cuts off what a GPU rounds",
            got=f"paddlepaddle {VERSION}",
            fix="rehearse with paddlepaddle 3.3, or leave fleetpipe_configs['rehearse'] out",
        )


def rehearse(dtype: str | None) -> None:
    """Starts to imitate a GPU's half precision on a CPU; ends an earlier imitation.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``; None to start none.
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
    """Replaces Paddle's check of a device, ``place``: returns whether a CPU imitates ``dtype``."""
    return dtype == rehearsal_dtype()


def end_rehearsal() -> None:
    """Ends the imitation of half precision on a CPU; warns if it has rounded nothing."""
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
    """Returns an operand of an operation after automatic casts to the dtype ``goal``.

    ``only`` is the one operand that the casts change; None if they change all operands.
    """
    if only is not None and tensor is not only:
        return tensor
    if tensor.dtype not in CASTABLE or tensor.dtype == goal:
        return tensor
    return cast(tensor, goal)


def _operation_of(method: str) -> str:
    """Returns the operation that a method of Tensor runs: "multiply" for ``__mul__``, ``__rmul__``.

    A method that is no arithmetic counts as an operation of its own name.
    """
    bare = method.strip("_")
    return _ARITHMETIC.get(bare) or _ARITHMETIC.get(bare.removeprefix("r"), method)


def automatic_dtype(operation: str, tensors: Sequence[Tensor]) -> DType | None:
    """Returns the dtype to which automatic casts bring an operation's operands; None without casts.

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
    considered = tensors[:1] if operation in NORMS else tensors
    return paddle.float32 if any(t.dtype == paddle.float32 for t in considered) else half


@functools.lru_cache(maxsize=16)
def _kernels_of(listed: frozenset[str]) -> frozenset[str]:
    """Returns the names in one of Paddle's lists, with the newer names of the same kernels."""
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
