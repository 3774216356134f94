"""Tensors: memory, gradients and the hooks on them.

The names are the same in 2.6.2 and 3.3.x, except that ``_apply_backward_hook`` and
``_unsafe_share_buffer_to`` are in 3.x only, where ``run_backward`` takes one more argument.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from paddle import _C_ops
from paddle.autograd.py_layer import PyLayerBackward
from paddle.base import core
from paddle.base import framework as _framework

from fleetpipe.aliases import DType, Tensor
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import without_casts
from fleetpipe.paddle_api.device import expected_place, synchronize

_Tensor: Any = core.eager.Tensor
_eager: Any = core.eager
#: Further arguments of ``run_backward``: do not keep the graph and, on 3.x, do not draw it.
_PLAINLY: tuple[object, ...] = (
    (False, None)
    if "dump_backward_graph_path" in inspect.signature(paddle.autograd.backward).parameters
    else (False,)
)
#: Whether :func:`run_reduce_hooks` works: on 3.x.
CAN_RUN_REDUCE_HOOKS = hasattr(paddle.Tensor, "_apply_backward_hook")
#: Adds a hook to the gradient of a tensor, and returns its number; removes the hook of a number.
put_grad_hook: Callable[[Tensor, Callable[[Tensor], object]], int] = _Tensor._register_grad_hook
remove_grad_hook: Callable[[Tensor, int], bool] = _Tensor._remove_grad_hook

#: The methods of a tensor that need its values: those of Paddle's table, operators and some others,
#: except those that need only shape and dtype.
_OF_NUMBERS = {
    *paddle.tensor.tensor_method_func,
    *(name for name in set(dir(_Tensor)) - set(dir(object)) if name.startswith("__")),
    *("astype", "clone", "copy_", "cpu", "detach", "fill_", "item", "numpy", "set_value"),
    *("tolist", "value", "zero_"),
} - {*("__len__", "is_complex", "is_floating_point", "is_integer", "is_tensor", "numel", "rank")}

#: The code of ``ctx.save_for_backward``, and of ``ctx.saved_tensor``, of a ``PyLayer``.
_PYLAYER_CODES = [
    getattr(paddle.autograd.PyLayerContext, name).__code__
    for name in ("save_for_backward", "saved_tensor")
]


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    # Not tensor.size: Paddle computes it by NumPy, which takes as long as a small layer.
    return int(math.prod(tensor.shape)) * int(tensor.element_size())


def to_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to the host's memory once it has been computed.

    ``cpu()`` waits for every stream of a GPU, also for sends, which may last until a peer receives.
    """
    # Detached: a graph may be freed with the copy, in a thread of CUDA's, where a PyLayer's node
    # takes Python's lock.
    copied: Tensor = tensor.detach()._copy_to(core.CPUPlace(), False)
    synchronize()
    return copied


def to_device(tensor: Tensor) -> Tensor:
    """Copies a tensor to the computing device, ordered before later computations.

    ``to()`` waits for every stream of a GPU, and on 2.6.2 moves the tensor itself.
    """
    copied: Tensor = tensor._copy_to(expected_place(), False)
    return copied


def empty_on_host(shape: Sequence[int], dtype: DType) -> Tensor:
    """Returns an uninitialized tensor in the host's memory, allocated by Paddle."""
    made: Tensor = _C_ops.empty([*shape], dtype, core.CPUPlace())
    return made


def is_state_of_cudnn(tensor: Tensor) -> bool:
    """Whether a tensor may be the ``_dropout_state`` that recurrent layers have for a GPU."""
    return not tensor.shape and tensor.dtype == paddle.uint8


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a value: an LSTM has a buffer that never gets one on a CPU."""
    return bool(tensor._is_initialized())


def initializer_of(parameter: Tensor) -> Any:
    """Returns the initializer of a parameter of ``paddle.LazyGuard``; None once it has run.

    Its fans are set from the parameter's full shape, so that Xavier's initializer draws a part of
    the parameter as it would draw the full one.
    """
    if parameter._init_func is None:
        return None
    initializer = copy.copy(parameter._init_func.func.__self__)
    for fan, size in zip(("_fan_in", "_fan_out"), parameter.shape):
        if hasattr(initializer, "_fan_out") and getattr(initializer, fan) is None:
            setattr(initializer, fan, size)
    return initializer


def copy_of(tensor: Tensor) -> Tensor:
    """Copies a tensor to new memory, with the same values and the same graph."""
    if tensor.is_selected_rows():
        # Paddle cannot clone a gradient of selected rows; 2.6.2 crashes.
        return paddle.scale(tensor, 1.0)
    # Paddle 2.6.2 cannot clone a tensor without elements, into which nobody writes.
    return tensor if 0 in tensor.shape else tensor.clone()


def contiguous(tensor: Tensor) -> Tensor:
    """Returns a tensor itself if it is contiguous, else a copy.

    ``tensor.contiguous()`` would change the tensor, and those detached from it, which then are no
    views any more.
    """
    return tensor if tensor.is_contiguous() else copy_of(tensor)


class MemoryLayout(NamedTuple):
    """Where the elements of a tensor are in its memory; that of a view differs from a new tensor's.

    Attributes:
        strides: For each axis, the distance of neighbours, in elements.
        offset: The bytes before the first element.
    """

    strides: tuple[int, ...]
    offset: int


def layout_of(tensor: Tensor) -> MemoryLayout:
    """Returns the layout of a tensor."""
    return MemoryLayout(tuple(tensor.strides), tensor.offset)


def with_layout(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Returns a tensor itself if it has a layout, else a copy of its values that has it.

    A copy is detached from the graph but, unlike a leaf, may be written into.
    """
    if 0 in tensor.shape or layout_of(tensor) == layout:
        return tensor
    with without_casts():
        ends = [(size - 1) * stride for size, stride in zip(tensor.shape, layout.strides)]
        numbers = layout.offset // tensor.element_size() + sum(max(end, 0) for end in ends) + 1
        memory = paddle.empty([numbers], tensor.dtype)
        place = (tensor.shape, layout.strides, layout.offset)
        paddle.assign(tensor.detach(), paddle.as_strided(memory, *place))
        memory.stop_gradient = tensor.stop_gradient
        return paddle.as_strided(memory, *place)


def release_memory(tensor: Tensor) -> None:
    """Frees the memory of a tensor, which keeps its shape."""
    tensor.get_tensor()._clear()


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors use the same memory."""
    return bool(tensor._is_shared_buffer_with(other))


@contextmanager
def without_memory(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While this context is open, tensors have no memory: Paddle refuses to compute with them."""
    kept = [(tensor, paddle.empty([0], tensor.dtype)) for tensor in tensors if has_memory(tensor)]
    for tensor, memory in kept:
        tensor._share_buffer_to(memory)
        release_memory(tensor)
    try:
        yield
    finally:
        for tensor, memory in kept:
            memory._share_buffer_to(tensor)


def is_missing_memory_error(error: BaseException) -> bool:
    """Whether an error is Paddle's error for a tensor without memory."""
    said = f"{error} {error.__cause__}"
    return any(words in said for words in ("holds no memory", "not initialized", "has_allocation"))


def note_write(tensor: Tensor) -> None:
    """Raises a tensor's version, as a write into it does."""
    tensor._bump_inplace_version()


def leaf_on_same_memory(tensor: Tensor) -> Tensor:
    """Returns a leaf of the graph with the memory of ``tensor``; either can be released alone."""
    if hasattr(tensor, "_unsafe_share_buffer_to"):
        other = tensor.detach()
    else:
        # On 2.6.2 a detached tensor shares its inner object: autograd would empty both.
        kind = core.VarDesc.VarType.LOD_TENSOR
        other = core.eager.Tensor(tensor.dtype, tensor.shape, "", kind, False)
        tensor._share_buffer_to(other)
    other.stop_gradient = tensor.stop_gradient
    return other


def take_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the gradient of a tensor, without a copy, and removes it from the tensor."""
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        parameter.main_grad = None
        return main
    gradient = parameter.grad
    if gradient is None or gradient.is_selected_rows():
        return gradient
    # clear_gradient empties the gradient's tensor, but not a view of its memory.
    taken = gradient.view(gradient.shape)
    parameter.clear_gradient(False)
    return taken


def give_memory(source: Tensor, parameter: Tensor) -> None:
    """Makes ``parameter``, which has no memory yet, share that of ``source``, without a copy."""
    source._share_underline_tensor_to(parameter)


def parameter_on_same_memory(parameter: Tensor) -> Tensor:
    """Returns another parameter with the same memory and attributes, and a gradient of its own."""
    other = _framework.EagerParamBase(
        parameter.shape, parameter.dtype, trainable=not parameter.stop_gradient
    )
    name = other.name
    vars(other).update(vars(parameter))
    other.name = name
    give_memory(parameter, other)
    return other


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a Parameter object, with all its attributes."""
    return isinstance(tensor, _framework.EagerParamBase)


class NoNumbersError(StateError):
    """The values of a parameter are needed, and another rank has them."""


class ElsewhereParameter(_framework.EagerParamBase):
    """A parameter whose values another rank has; to read or write them here is an error.

    Paddle itself would read nothing, or raise an error that names neither parameter nor cause.
    """

    def numel(self, name: str | None = None) -> Tensor:
        """Returns the number of its elements; Paddle's own method needs its memory."""
        return paddle.full([], math.prod(self.shape), "int64", name)

    def _require_numbers(self) -> None:
        if not has_memory(self):
            raise NoNumbersError(
                "the numbers of this weight are on another rank, and on this one there are none",
                where=f"parameter {self.name!r}, of shape {list(self.shape)}",
                cause="fleetpipe.pipeline leaves each rank of a pipeline the weights of its stages",
                fix="read pipe.full_state_dict(), which every rank calls, and set by "
                "pipe.load_from(state); to copy the model, copy it before fleetpipe.pipeline",
            )


def _requiring_numbers(name: str) -> Callable[..., Any]:
    original: Any = getattr(_framework.EagerParamBase, name)

    @functools.wraps(original)
    def method(self: ElsewhereParameter, *args: Any, **named: Any) -> Any:
        self._require_numbers()
        return original(self, *args, **named)

    return method


for _name in _OF_NUMBERS:
    if inspect.isroutine(getattr(_Tensor, _name, None)):
        setattr(ElsewhereParameter, _name, _requiring_numbers(_name))


def refuse_values_of(parameter: Tensor) -> None:
    """Makes it an error to read or write the values of a parameter while it has none."""
    parameter.__class__ = ElsewhereParameter


def run_backward(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Does the same as ``paddle.autograd.backward`` without its checks of the arguments.

    Between a forward and a backward the checks take 10 us, as their code is not in the caches.

    Args:
        tensors: Where to start, each once.
        grads: The gradient of each; None for ones.
    """
    _eager.run_backward(tensors, grads, *_PLAINLY)


def switch_gradients_on() -> None:
    """Turns gradients on again, which Paddle leaves off if a hook failed during backward."""
    framework: ModuleType = paddle.framework
    framework._dygraph_tracer()._has_grad = True


class SavedTensorHooks:
    """Works like ``paddle.autograd.saved_tensors_hooks``, but not within ``paddle.grad``.

    The graph for gradients of gradients saves its tensors unchanged there: Paddle fails if hooks
    replace some of them.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        backward: Callable[..., None],
    ) -> None:
        """Calls ``pack`` for each tensor to save, and ``unpack`` to get it back.

        Args:
            pack: Takes a tensor; returns the object to save.
            unpack: Takes that object; returns the tensor.
            backward: Called instead of a backward.
        """
        self._hooks = paddle.autograd.saved_tensors_hooks(pack, unpack)
        self._grad: Callable[..., Any] = _eager.run_partial_grad
        self._backward, self._run_backward = backward, _eager.run_backward

    def begin(self) -> None:
        """Starts to use the hooks."""
        self._hooks.__enter__()
        _eager.run_partial_grad, _eager.run_backward = self._freely, self._backward

    def end(self) -> None:
        """Stops using the hooks; :meth:`begin` may follow again."""
        self._hooks.__exit__()
        _eager.run_partial_grad, _eager.run_backward = self._grad, self._run_backward

    def _freely(self, *args: object) -> Any:
        self._hooks.__exit__()
        try:
            return self._grad(*args)
        finally:
            self._hooks.__enter__()


def is_for_pylayer() -> bool:
    """Whether the caller was called to pack or unpack a tensor that a ``PyLayer`` saves.

    A ``PyLayer`` gets the same tensor back, with its graph; for operations Paddle adds the graph
    itself.
    """
    return sys._getframe(2).f_code in _PYLAYER_CODES


def saves_freely() -> bool:
    """Whether autograd saves tensors unchanged: no ``saved_tensors_hooks`` are open."""
    try:
        with paddle.autograd.saved_tensors_hooks(_no_change, _no_change):
            return True
    except ValueError:
        return False


def is_made_by_pylayer(tensor: Tensor) -> bool:
    """Whether a ``PyLayer`` returned a tensor. Paddle never frees that node of the graph."""
    return str(tensor.grad_fn.name()).startswith("GradNodePyLayer")


def call_after_gradient(parameter: Tensor, function: Callable[..., None]) -> None:
    """Makes autograd call ``function`` after each gradient that it adds to ``parameter``."""
    parameter._register_backward_hook(function)


def run_reduce_hooks(parameter: Tensor) -> None:
    """Runs the functions that are registered to run after a gradient of ``parameter``."""
    parameter._apply_backward_hook()


def route_grad_hooks(
    put: Callable[[Tensor, Callable[[Tensor], object]], int], remove: Callable[[Tensor, int], bool]
) -> None:
    """Makes ``tensor.register_hook``, and ``remove`` of its result, call these functions."""
    _Tensor._register_grad_hook = put
    _Tensor._remove_grad_hook = remove


def watch_pylayers(
    place_of: Callable[[type], object],
    running: Callable[[Any, Callable[..., Any]], AbstractContextManager[None]],
) -> None:
    """Makes the backward of each ``PyLayer`` run in a context; later calls change nothing.

    Args:
        place_of: Called with the user's class in its forward; its result is stored for backward.
        running: Returns the context of backward, given the stored result and the class's
            ``backward``.
    """
    made: Any = PyLayerBackward
    if "__init__" in vars(made):
        return
    original = made.backward

    def init(context: Any) -> None:
        context.place_of_call = place_of(context._forward_cls)

    def backward(context: Any, *grads: Any) -> Any:
        with running(context.place_of_call, context._forward_cls.backward):
            return original(context, *grads)

    made.__init__, made.backward = init, backward


def number_of_hook(parameter: Tensor) -> int:
    """Registers a hook on the gradient of ``parameter`` and removes it; returns its number.

    Paddle counts them from 0 for each parameter, removed ones too.
    """
    number = put_grad_hook(parameter, _no_change)
    remove_grad_hook(parameter, number)
    return number


def _no_change(_grad: Tensor) -> None:
    return None


def give_parameters_a_method(name: str, method: Callable[[Tensor, int], None]) -> None:
    """Adds a method to Parameters: ``parameter.name(stage)`` calls ``method(parameter, stage)``."""
    setattr(_framework.EagerParamBase, name, method)
