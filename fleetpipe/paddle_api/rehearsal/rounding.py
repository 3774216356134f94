"""Runs an operation on half-precision tensors in float32 and rounds its result.

Results have the dtypes of Paddle's GPU kernels: that of the first floating-point tensor, the widest
if operands are promoted, and float32 for the statistics that a normalization returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paddle import _C_ops
from paddle.base import core

from fleetpipe.aliases import DType, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import Function

_Tensor: Any = core.eager.Tensor
#: Paddle's own, whatever stands in their place during a rehearsal.
cast: Callable[[Tensor, DType], Tensor] = _C_ops.cast
_assign: Callable[[Tensor], Tensor] = _C_ops.assign
_write: Callable[[Tensor, Tensor], Tensor] = _C_ops.assign_out_

Arguments = tuple[Any, ...]
#: Operations that promote their operands to the widest dtype.
_PROMOTING = frozenset(
    {"add", "subtract", "multiply", "divide", "remainder", "floor_divide", "elementwise_pow"}
)


#: Those that write into an argument, and whose names do not say so.
_WRITING = ("_setitem_dygraph", "check_finite_and_unscale")


def writes(operation: str) -> bool:
    """Whether an operation writes into one of its arguments."""
    return operation.endswith("_") or operation in _WRITING


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of an operation, those in lists too."""
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, _Tensor))


def convert(change: Callable[[Tensor], Tensor], values: Iterable[Any]) -> Arguments:
    """Applies a function to each tensor among the arguments of an operation."""
    return tuple(
        change(value)
        if isinstance(value, _Tensor)
        else type(value)(change(one) if isinstance(one, _Tensor) else one for one in value)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    )


def compute(
    function: Function, operation: str, half: DType, args: Arguments, named: Mapping[str, Any]
) -> Any:
    """Runs an operation in float32, and rounds the results that a GPU has in ``half``."""
    rounds = _gives_half(operation, half, (*args, *named.values()))
    widen = functools.partial(_widen, half)
    result = function(*convert(widen, args), **dict(zip(named, convert(widen, named.values()))))
    return _round(result, operation, half) if rounds else result


def write(
    function: Function, operation: str, half: DType, args: Arguments, named: Mapping[str, Any]
) -> Any:
    """Runs an operation that writes into its arguments on float32 copies, and copies these back.

    For a parameter that an optimizer steps, the copy is its master weight, if it has one.
    """
    copies = _Copies(half, list(tensors_of(args)))
    wide = convert(copies.of, args)
    result = function(*wide, **named)
    results = wide[:1] if result is None else result if isinstance(result, tuple) else (result,)
    listed = tensors_of(value for value in wide if isinstance(value, list))
    copies.write_back((*listed, *tensors_of(results)))
    first, *rest = map(copies.original, results)
    if first is results[0] and all(first is not value for value in wide):
        first = _round(first, operation, half)
    return (first, *rest) if isinstance(result, tuple) else None if result is None else first


#: By the names of parameters, the master weights of the optimizer that steps now.
_masters: Mapping[str, Tensor] = {}


def with_master_weights(apply: Function) -> Function:
    """Wraps an optimizer's method so that its master weights serve as float32 copies."""

    @functools.wraps(apply)
    def apply_optimize(optimizer: Any, *args: Any, **named: Any) -> Any:
        global _masters
        before, _masters = _masters, optimizer._master_weights
        try:
            return apply(optimizer, *args, **named)
        finally:
            _masters = before

    return apply_optimize


class _Copies:
    """The float32 copies of half-precision arguments, with the argument of each."""

    def __init__(self, half: DType, tensors: list[Tensor]) -> None:
        self._half = half
        self._masters = {t.name: _masters[t.name] for t in tensors if t.name in _masters}
        self._of: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the copy that replaces an argument."""
        if tensor.dtype != self._half:
            # Some kernels of CPUs step the parameter alone, others look at both.
            is_master = any(tensor is master for master in self._masters.values())
            return _assign(tensor) if is_master else tensor
        for original, copy in self._of.values():
            if original is tensor:
                return copy
        copy = self._masters.get(tensor.name)
        copy = cast(tensor, paddle.float32) if copy is None else copy
        self._of[id(copy)] = (tensor, copy)
        return copy

    def original(self, value: Any) -> Any:
        """Returns the argument whose copy is ``value``; else ``value`` itself."""
        return self._of[id(value)][0] if id(value) in self._of else value

    def write_back(self, values: Iterable[Tensor]) -> None:
        """Rounds the copies among ``values`` back into their originals."""
        for key in {id(value) for value in values} & self._of.keys():
            tensor, copy = self._of[key]
            _write(cast(copy, self._half), tensor)


def _gives_half(operation: str, half: DType, values: Arguments) -> bool:
    """Whether a GPU has the results of an operation in ``half``."""
    if any(isinstance(value, type(paddle.float32)) for value in values):
        # The operation makes that dtype by itself.
        return False
    floats = [tensor for tensor in tensors_of(values) if tensor.is_floating_point()]
    if operation in _PROMOTING:
        # A tensor of no dimension counts where there are no others.
        floats = [tensor for tensor in floats if tensor.ndim] or floats
        return all(tensor.dtype == half for tensor in floats)
    return bool(floats[0].dtype == half)


def _widen(half: DType, tensor: Tensor) -> Tensor:
    return cast(tensor, paddle.float32) if tensor.dtype == half else tensor


def _round(result: Any, operation: str, half: DType) -> Any:
    if isinstance(result, _Tensor):
        return cast(result, half) if result.dtype == paddle.float32 else result
    if not isinstance(result, (tuple, list)):
        return result
    # What a normalization returns beside its output are statistics.
    count = 1 if "norm" in operation else len(result)
    rounded = [_round(one, operation, half) for one in result[:count]]
    return type(result)([*rounded, *result[count:]])
