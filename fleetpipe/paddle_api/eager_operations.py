"""Calls, intercepts and replaces Paddle's operations in dynamic graph, for 2.6.2 and 3.3.x.

Operations are functions of ``core.eager.ops``, which modules import by name, or methods of Tensor
that are written in C. Some are called here without the checks of their public functions, which take
as long as a small kernel; autograd, automatic casts and ``capture`` treat them like any other. They
are the same in both versions, except for :func:`mean_leaves_out_below_zero`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

from paddle import _C_ops, _legacy_C_ops
from paddle.base import core

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.paddle_api import VERSION, paddle, replaced

#: Whether a gather by an empty index has a backward (3.x); on 2.6.2 it ends the process.
CAN_GATHER_NOTHING: bool = not VERSION.startswith("2.")

_matmul: Callable[..., Tensor] = _C_ops.matmul

# Typed as a module: Paddle's stub lacks a name that is used here.
_paddle: ModuleType = paddle

#: ``linear(x, weight, bias)``; for a GPU Paddle chooses among several operations.
linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
    _paddle.nn.functional.linear if _paddle.is_compiled_with_cuda() else _C_ops.linear
)


#: ``add_in_place(left, right)`` adds ``right`` to ``left``, of the same shape and dtype.
add_in_place: Callable[[Tensor, Tensor], Tensor] = _C_ops.add_
#: ``total(left, right)`` returns ``left + right``.
total: Callable[[Tensor, Tensor], Tensor] = _C_ops.add
#: ``expand(tensor, shape)`` broadcasts a tensor; ``reshape(tensor, shape)`` reshapes it.
expand: Callable[..., Tensor] = _C_ops.expand
reshape: Callable[..., Tensor] = _C_ops.reshape

#: A function of Paddle's, a method in C, or a layer.
Function = Callable[..., Any]

_Tensor: Any = core.eager.Tensor

#: The methods that add a hook to a gradient, and remove it.
GRAD_HOOKS = ("_register_grad_hook", "_remove_grad_hook")
#: The method by which Paddle's ``recompute`` copies its arguments.
SHARED_BY_RECOMPUTE = "_new_shared_tensor"
#: Arithmetic methods in C.
ARITHMETIC = (
    *(f"__{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__r{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")),
    *(f"__{name}__" for name in ("matmul", "rmatmul", "eq", "ne", "lt", "le", "gt", "ge")),
)
#: Methods in C that compute a Tensor, write into one, or change its gradient.
_METHODS = (
    *ARITHMETIC,
    *("_getitem_dygraph", "_setitem_dygraph", "clone", "contiguous", "detach", "detach_"),
    *("copy_", "_copy_to", "_local_value", *GRAD_HOOKS),
    *(SHARED_BY_RECOMPUTE, "set_value", "_tensor_use_gpudnn"),
)
#: A method whose result has its tensor's node in the graph: backward refuses both as roots.
_ALIAS = "_tensor_use_gpudnn"
#: Whether ``tensor.data = other`` takes all properties of ``other``, not only its memory.
DATA_ENDS_TRAINING = paddle.version.full_version.startswith("2.")
#: Operations that write into their first argument, and leave its version as it is.
_SILENT = frozenset({"set_value", "copy_", "assign_value_", "set_data"})
#: Methods in C that share, give or take a Tensor's memory.
_MEMORY = (
    *("get_tensor", "_share_buffer_to", "_share_underline_tensor_to", "_unsafe_share_buffer_to"),
    *("_clear", "_clear_data", "_set_impl", "_inplace_assign"),
)
#: Methods in C that read a Tensor's values.
_READS = ("numpy", "_getitem_from_offset", "data_ptr", "_copy_gradient_from")
#: Functions that compute gradients.
_BACKWARDS = ("run_backward", "run_partial_grad")


def product(
    left: Tensor, right: Tensor, left_transposed: bool = False, right_transposed: bool = False
) -> Tensor:
    """Returns ``left @ right``, after transposing either of them on request."""
    return _matmul(left, right, left_transposed, right_transposed)


@cache
def mean_leaves_out_below_zero() -> bool:
    """Returns whether the mean of a cross-entropy ignores positions of a negative ``ignore_index``.

    2.6.2 divides by the number of the other positions, 3.3.x by that of all.
    """
    labels = paddle.to_tensor([0, -100])
    loss = paddle.nn.functional.cross_entropy(paddle.zeros([2, 2]), labels, ignore_index=-100)
    # Log 2, or half of it.
    return float(loss) > 0.5


def is_silent(function: Function) -> bool:
    """Returns whether an operation writes into its first argument and leaves its version as it is.

    Autograd compares versions to notice that a saved tensor has changed.
    """
    return getattr(function, "__name__", "") in _SILENT


def with_raised_version(function: Function) -> Function:
    """Returns an operation that writes into its first argument, and increments its version too.

    Autograd compares versions to notice that a saved tensor has changed.

    Args:
        function: An operation that leaves the version as it is.
    """

    @functools.wraps(function)
    def write(tensor: Tensor, *args: Any, **named: Any) -> Any:
        output = function(tensor, *args, **named)
        tensor._bump_inplace_version()
        return output

    return write


def target_of(function: Function, args: tuple[Any, ...]) -> Tensor | None:
    """Returns the tensor into which an operation writes; None if it writes into none.

    Args:
        function: The operation.
        args: The positional arguments of its call.
    """
    name = getattr(function, "__name__", "")
    if name == "assign_out_":
        return args[1]
    # The name of an operation that writes into its first argument ends with one underscore.
    writes = name.endswith("_") and not name.endswith("__") and name != "detach_"
    writes = writes or name == "_setitem_dygraph" or is_silent(function)
    return args[0] if writes and args and isinstance(args[0], _Tensor) else None


class OperationListener(Protocol):
    """Gets the operations that :func:`intercepting` intercepts, each by one of these methods.

    The arguments of a method are the intercepted function, its positional arguments ``args``, and
    its keyword arguments ``named``. The method may run the function. What it returns is the result
    of the call in the user's code: usually the function's result.
    """

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called instead of an operation; returns the result of the call."""

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        """Called instead of a layer, which ``call(layer, *args, **named)`` runs."""

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called instead of a function that turns a Tensor into numbers; returns the numbers."""

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called instead of a function that accesses a Tensor's memory; returns its result."""

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """Called when a Tensor's shape is read; returns the shape to give instead."""

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Called instead of a function that computes gradients; returns the function's result."""

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Called instead of Paddle's ``recompute(function, *args)``, which ``call()`` runs."""

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """Called when an attribute of a layer is set, which ``put(layer, name, value)`` does."""


class _PassiveListener:
    """An :class:`OperationListener` that only runs operations: for threads of a data loader."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return function(*args, **named)

    read = backward = memory = operation

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        return call(layer, *args, **named)

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls Paddle's ``recompute(function, *args)``, which is what ``call()`` does."""
        return call()

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        return shape

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        put(layer, name, value)


#: Returns the :class:`OperationListener` for the operations of the thread that calls it.
_Choice = Callable[[], OperationListener]


@contextmanager
def intercepting(listener: OperationListener) -> Iterator[None]:
    """Opens a context in which operations and layer calls of this thread go to ``listener``."""
    thread, passive = get_ident(), _PassiveListener()

    def choose() -> OperationListener:
        return listener if get_ident() == thread else passive

    # What is replaced: a module or class, a name in it, and the replacement.
    names: list[tuple[Any, str, Any]] = [
        (module, name, functools.partial(_pass_to_listener, choose, "operation", function))
        for module, name, function in bound_operations()
    ]
    tensor: Mapping[str, Any] = vars(_Tensor)
    shape = tensor["shape"]
    for methods, event in ((_METHODS, "operation"), (_READS, "read"), (_MEMORY, "memory")):
        for name in methods:
            if name in tensor:
                function = _with_own_node(tensor[name]) if name == _ALIAS else tensor[name]
                names.append((_Tensor, name, _method_to_listener(choose, event, function)))
    names += [
        (_Tensor, "stop_gradient", _stop_gradient_property(choose, tensor["stop_gradient"])),
        (_Tensor, "register_hook", _tolerant_register_hook(tensor["register_hook"])),
        (_Tensor, "data", _data_property(choose, tensor["data"])),
        (_Tensor, "shape", property(lambda value: choose().shape(value, shape.__get__(value)))),
        (_Tensor, "size", _size_property(tensor["size"])),
        (paddle.nn.Layer, "__call__", _layer_call(choose, paddle.nn.Layer.__call__)),
        (paddle.nn.Layer, "__setattr__", _layer_setattr(choose, paddle.nn.Layer.__setattr__)),
        (core.eager.PyLayer, "apply", _pylayer_apply(choose, vars(core.eager.PyLayer)["apply"])),
    ]
    for name in _BACKWARDS:
        function = vars(core.eager)[name]
        replacement = functools.partial(_pass_to_listener, choose, "backward", function)
        names.append((core.eager, name, replacement))
    with replaced(*names):
        yield


def _pass_to_listener(
    choose: _Choice, event: str, function: Function, /, *args: Any, **named: Any
) -> Any:
    """Calls the listener's method ``event`` in place of a function of Paddle's, with its arguments.

    ``choose`` returns the listener of the calling thread, an :class:`OperationListener`.
    """
    return getattr(choose(), event)(function, args, named)


def _method_to_listener(choose: _Choice, event: str, function: Function) -> Function:
    """Returns a method of Tensor that acts as :func:`_pass_to_listener` for ``function``.

    The result is a function, since a ``partial`` in a class would not get the tensor.
    """

    def method(*args: Any, **named: Any) -> Any:
        return getattr(choose(), event)(function, args, named)

    return method


def _layer_call(choose: _Choice, call: Function) -> Function:
    """Returns a ``Layer.__call__`` that calls the listener in place of Paddle's own, ``call``."""

    def __call__(layer: Layer, *args: Any, **named: Any) -> Any:
        return choose().layer(call, layer, args, named)

    return __call__


def _stop_gradient_property(choose: _Choice, flag: Any) -> property:
    """Returns a property for ``Tensor.stop_gradient``: each change calls the listener.

    ``choose`` returns the listener of the calling thread; ``flag`` is Paddle's own property.
    """

    def put(tensor: Tensor, value: bool) -> None:
        if flag.__get__(tensor) != value:
            choose().operation(set_stop_gradient, (tensor, value), {})

    def set_stop_gradient(tensor: Tensor, value: bool) -> None:
        flag.__set__(tensor, value)

    return property(flag.__get__, put)


def _with_own_node(function: Function) -> Function:
    """Returns a wrapper of a method that gives the result its own node in autograd's graph."""

    def tensor_use_gpudnn(tensor: Tensor, *args: Any) -> Tensor:
        return function(paddle.assign(tensor), *args)

    return tensor_use_gpudnn


class _NoHook:
    """The handle of a hook that was not registered, as its tensor gets no gradient."""

    def remove(self) -> bool:
        """Does nothing, as there is no hook."""
        return False


def _tolerant_register_hook(register: Function) -> Function:
    """Returns a ``Tensor.register_hook`` that accepts a tensor without a gradient in evaluation."""

    def register_hook(tensor: Tensor, hook: Function) -> Any:
        if tensor.stop_gradient and not paddle.is_grad_enabled():
            # A pipeline evaluates without gradients, where a plain model may have them.
            return _NoHook()
        return register(tensor, hook)

    return register_hook


def _data_property(choose: _Choice, data: Any) -> property:
    """Returns a property for ``Tensor.data``: reads and writes call the listener as operations.

    ``choose`` returns the listener of the calling thread; ``data`` is Paddle's own property.
    """

    def get_data(tensor: Tensor) -> Tensor:
        return data.__get__(tensor)

    def get(tensor: Tensor) -> Tensor:
        return choose().operation(get_data, (tensor,), {})

    def put(tensor: Tensor, value: Tensor) -> None:
        choose().operation(set_data, (tensor, value), {})

    return property(get, put)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Makes ``tensor`` use the memory of ``value`` instead of its own; nothing else changes."""
    value._share_underline_tensor_to(tensor)


def move_to_new_memory(tensor: Tensor) -> None:
    """Moves a tensor to new memory, so that a graph that uses it keeps the old values."""
    set_data(tensor, tensor.detach().clone())


def _size_property(size: Any) -> property:
    """Returns a property for ``Tensor.size``; ``size`` is Paddle's own.

    A listener may give a shape whose entries are no ints: then their product, which is no int
    either, is the size.
    """

    def count(tensor: Tensor) -> Any:
        """Returns the size of a tensor, the product of its shape."""
        shape = tensor.shape
        is_plain = all(type(length) is int for length in shape)
        # Paddle's own property would turn the product into an int.
        return size.__get__(tensor) if is_plain else math.prod(shape)

    return property(count)


def _layer_setattr(choose: _Choice, put: Function) -> Function:
    """Returns a ``Layer.__setattr__`` that calls the listener in place of Paddle's own, ``put``."""

    def __setattr__(layer: Layer, name: str, value: Any) -> None:
        choose().assigned(put, layer, name, value)

    return __setattr__


def _pylayer_apply(choose: _Choice, apply: Any) -> Any:
    """Returns a ``PyLayer.apply`` that calls the listener; Paddle's recompute is a PyLayer, too.

    ``choose`` returns the listener of the calling thread; ``apply`` is Paddle's own class method.
    """

    def apply_class(kind: Any, *args: Any, **named: Any) -> Any:
        """Calls the listener for the ``PyLayer`` class ``kind``."""
        call = apply.__get__(None, kind)
        if kind.__name__ == "RecomputeFunction" and kind.__module__.startswith("paddle."):
            # Its parameters: ctx, the function, options (whose number differs by version), *args.
            options = [
                name
                for name, parameter in inspect.signature(kind.forward).parameters.items()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ]
            operands = args[len(options) - 1 :]
            return choose().recompute(lambda: call(*args, **named), args[0], operands)
        return choose().operation(call, args, named)

    return classmethod(apply_class)


def bound_operations() -> Iterator[tuple[Any, str, Function]]:
    """Yields (module, name, operation) for each name in a Python module that is an operation's."""
    for module, name, function in _operations_in(frozenset(sys.modules), _C_ops.matmul):
        if vars(module).get(name) is function:
            yield module, name, function


@functools.lru_cache(maxsize=1)
def _operations_in(modules: frozenset[str], matmul: Function) -> list[tuple[Any, str, Function]]:
    """Returns (module, name, operation) for each operation; the arguments are the cache's key.

    Args:
        modules: The names of the modules that are loaded.
        matmul: One of the operations: a rehearsal of half precision on a CPU, the option
            ``rehearse``, replaces them all, and so this one.
    """
    types = {
        function
        for module in (_C_ops, _legacy_C_ops)
        for function in vars(module).values()
        if _is_operation(function)
    }
    return [
        (module, name, value)
        for path, module in list(sys.modules.items())
        # Not the library itself, from which Paddle's modules import the functions.
        if not path.startswith("paddle.base.libpaddle") and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if _is_operation(value) and value in types
    ]


def _is_operation(value: Any) -> bool:
    """Returns whether a value is a C function, or a wrapper that imitates half precision."""
    wrapped = getattr(value, "__wrapped__", None) if isinstance(value, FunctionType) else value
    return isinstance(wrapped, BuiltinFunctionType)


def provide_operations(operations: Mapping[str, Function]) -> None:
    """Replaces operations that lack a CPU kernel, in dynamic graph.

    Args:
        operations: The replacements by Paddle's names; each takes the operation's tensors by
            position and its attributes as keywords.
    """
    for module in (_C_ops, _legacy_C_ops):
        for name in operations.keys() & vars(module).keys():
            setattr(module, name, _with_replacement(operations[name], vars(module)[name]))


def _with_replacement(function: Function, stock: Function) -> Function:
    """Returns an operation that calls ``function`` in dynamic graph, and else ``stock``."""

    def operation(*args: Any) -> Any:
        """Calls the replacement with tensors by position, and attributes by name."""
        if not paddle.in_dynamic_mode():
            return stock(*args)
        # _legacy_C_ops gets the name of each attribute before its value, after the tensors.
        strings = (index for index, value in enumerate(args) if isinstance(value, str))
        # The number of tensors: the position of the first name.
        tensors = next(strings, len(args))
        attributes = dict(zip(args[tensors::2], args[tensors + 1 :: 2]))
        return function(*args[:tensors], **attributes)

    return operation
