"""Where operations enter Paddle in dynamic graph, for paddlepaddle 2.6.2 and 3.3.x.

All go through functions of ``core.eager.ops`` and their kin, which modules hold by name, or through
methods of the Tensor that are written in C.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from types import BuiltinFunctionType, ModuleType
from typing import Any, Callable, Protocol

from paddle import _C_ops, _legacy_C_ops
from paddle.base import core

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Tensor

#: Anything that is called: a function of Paddle's, a method in C, a layer.
Function = Callable[..., Any]

_Tensor: Any = core.eager.Tensor

#: Methods in C that compute a Tensor, write into one, or change its gradient.
_METHODS = (
    *(f"__{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__r{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__{name}__" for name in ("matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge")),
    *("_getitem_dygraph", "_setitem_dygraph", "clone", "contiguous", "detach", "detach_"),
    *("copy_", "_copy_to", "_local_value", "_register_grad_hook", "_remove_grad_hook"),
    "_new_shared_tensor",
)
#: Methods in C that read a Tensor's numbers.
_READS = ("numpy", "_getitem_from_offset", "data_ptr", "_copy_gradient_from")
#: What computes gradients.
_BACKWARDS = ("run_backward", "run_partial_grad")


class Listener(Protocol):
    """What is called in the place of operations, and does them."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called for an operation."""

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        """Called for the call of a layer: ``call(layer, *args, **named)``."""

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called for what makes numbers of Python's of a Tensor."""

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called for what computes gradients."""

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Called for Paddle's ``recompute(function, *args)``, which ``call()`` does."""

    def assigned(self, name: str, value: Any) -> None:
        """Called before an attribute of a layer is set."""


class _Unheard:
    """Does the operations of other threads, say a loader's: a listener."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return function(*args, **named)

    read = backward = operation

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        return call(layer, *args, **named)

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        return call()

    def assigned(self, name: str, value: Any) -> None:
        pass


#: Returns whom the operations of the thread that calls it go to.
_Choice = Callable[[], Listener]


@contextmanager
def intercepted(listener: Listener) -> Iterator[None]:
    """Within it each operation, call of a layer, and so on of this thread goes to ``listener``."""
    replaced: list[tuple[Any, str, Any]] = []
    thread, unheard = get_ident(), _Unheard()

    def chosen() -> Listener:
        return listener if get_ident() == thread else unheard

    def put(holder: Any, name: str, value: Any) -> None:
        replaced.append((holder, name, vars(holder)[name]))
        setattr(holder, name, value)

    try:
        for module, name, function in _bound_operations():
            put(module, name, functools.partial(_called, chosen, "operation", function))
        for names, heard in ((_METHODS, "operation"), (_READS, "read")):
            for name in names:
                if name in vars(_Tensor):
                    put(_Tensor, name, _method(chosen, heard, vars(_Tensor)[name]))
        gradient_flag = vars(_Tensor)["stop_gradient"]
        put(_Tensor, "stop_gradient", _flag(chosen, gradient_flag))
        for name in _BACKWARDS:
            function = vars(core.eager)[name]
            put(core.eager, name, functools.partial(_called, chosen, "backward", function))
        put(paddle.nn.Layer, "__call__", _layer_call(chosen, paddle.nn.Layer.__call__))
        put(paddle.nn.Layer, "__setattr__", _setting(chosen, paddle.nn.Layer.__setattr__))
        put(core.eager.PyLayer, "apply", _apply(chosen, vars(core.eager.PyLayer)["apply"]))
        yield
    finally:
        for holder, name, value in reversed(replaced):
            setattr(holder, name, value)


def _called(chosen: _Choice, heard: str, function: Function, /, *args: Any, **named: Any) -> Any:
    return getattr(chosen(), heard)(function, args, named)


def _method(chosen: _Choice, heard: str, function: Function) -> Function:
    def method(*args: Any, **named: Any) -> Any:
        return getattr(chosen(), heard)(function, args, named)

    return method


def _layer_call(chosen: _Choice, call: Function) -> Function:
    def __call__(layer: Layer, *args: Any, **named: Any) -> Any:
        return chosen().layer(call, layer, args, named)

    return __call__


def _flag(chosen: _Choice, flag: Any) -> property:
    def put(tensor: Tensor, value: bool) -> None:
        if flag.__get__(tensor) != value:
            chosen().operation(set_stop_gradient, (tensor, value), {})

    def set_stop_gradient(tensor: Tensor, value: bool) -> None:
        flag.__set__(tensor, value)

    return property(flag.__get__, put)


def _setting(chosen: _Choice, put: Function) -> Function:
    def __setattr__(layer: Layer, name: str, value: Any) -> None:
        chosen().assigned(name, value)
        put(layer, name, value)

    return __setattr__


def _apply(chosen: _Choice, apply: Any) -> Any:
    def applied(kind: Any, *args: Any, **named: Any) -> Any:
        call = apply.__get__(None, kind)
        if kind.__name__ == "RecomputeFunction" and kind.__module__.startswith("paddle."):
            # ctx, the function, options in a number of their own in each version, *args.
            options = [
                name
                for name, parameter in inspect.signature(kind.forward).parameters.items()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ]
            given = args[len(options) - 1 :]
            return chosen().recompute(lambda: call(*args, **named), args[0], given)
        return chosen().operation(call, args, named)

    return classmethod(applied)


def _bound_operations() -> Iterator[tuple[Any, str, Function]]:
    """Yields each name by which a module of Python's holds an operation."""
    known = {
        function
        for module in (_C_ops, _legacy_C_ops)
        for function in vars(module).values()
        if isinstance(function, BuiltinFunctionType)
    }
    for path, module in list(sys.modules.items()):
        # Those of the library itself are where Paddle's modules take the functions from.
        if path.startswith("paddle.base.libpaddle") or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, BuiltinFunctionType) and value in known:
                yield module, name, value
