"""Reads and changes tensors: their memory, gradients, hooks and nodes in autograd's graph.

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
#: Further arguments of ``run_backward``: not to keep the graph and, on 3.x, not to draw it.
_BACKWARD_OPTIONS: tuple[object, ...] = (
    (False, None)
    if "dump_backward_graph_path" in inspect.signature(paddle.autograd.backward).parameters
    else (False,)
)
#: Whether :func:`run_reduce_hooks` works: on 3.x.
CAN_RUN_REDUCE_HOOKS = hasattr(paddle.Tensor, "_apply_backward_hook")
#: ``put_grad_hook(tensor, hook)`` adds a hook to the gradient of a tensor, and returns its number;
#: ``remove_grad_hook(tensor, number)`` removes it.
put_grad_hook: Callable[[Tensor, Callable[[Tensor], object]], int] = _Tensor._register_grad_hook
remove_grad_hook: Callable[[Tensor, int], bool] = _Tensor._remove_grad_hook

#: The methods of a tensor that need its values: those of Paddle's table, operators and some others,
#: without those that need only shape and dtype.
_METHODS_ON_VALUES = {
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
    """Returns a detached copy of a tensor in the host's memory, once the tensor is computed.

    Paddle's ``cpu()`` waits for every stream of a GPU, also for sends, which may last until a peer
    receives.
    """
    # Detached: a graph may be freed with the copy, in a thread of CUDA's, where a PyLayer's node
    # takes Python's lock.
    copied: Tensor = tensor.detach()._copy_to(core.CPUPlace(), False)
    synchronize()
    return copied


def to_device(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor on this process's device, which later computations wait for.

    Paddle's ``to()`` waits for every stream of a GPU, and on 2.6.2 moves the tensor itself.
    """
    copied: Tensor = tensor._copy_to(expected_place(), False)
    return copied


def empty_on_host(shape: Sequence[int], dtype: DType) -> Tensor:
    """Returns an uninitialized tensor in the host's memory, allocated by Paddle."""
    empty: Tensor = _C_ops.empty([*shape], dtype, core.CPUPlace())
    return empty


def is_state_of_cudnn(tensor: Tensor) -> bool:
    """Returns whether a tensor may be the buffer ``_dropout_state`` of a recurrent layer.

    Only cuDNN uses that buffer, which is uint8 of shape [] and may lack memory on a CPU.
    """
    return not tensor.shape and tensor.dtype == paddle.uint8


def has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor has a value; a buffer of an LSTM never gets one on a CPU."""
    return bool(tensor._is_initialized())


def initializer_of(parameter: Tensor) -> Any:
    """Returns the initializer of a parameter of ``paddle.LazyGuard``; None once it has run.

    The fan-in and fan-out of the initializer are set from the parameter's full shape, so that
    Xavier's initializer draws a shard from the same distribution as the full parameter.
    """
    if parameter._init_func is None:
        return None
    # ``_init_func`` is a partial of a method of the initializer.
    initializer = copy.copy(parameter._init_func.func.__self__)
    for fan, size in zip(("_fan_in", "_fan_out"), parameter.shape):
        if hasattr(initializer, "_fan_out") and getattr(initializer, fan) is None:
            setattr(initializer, fan, size)
    return initializer


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor in new memory, through which gradients flow back to the tensor."""
    if tensor.is_selected_rows():
        # Paddle cannot clone a gradient of selected rows; 2.6.2 crashes.
        return paddle.scale(tensor, 1.0)
    # Paddle 2.6.2 cannot clone a tensor without elements, into which nobody writes.
    return tensor if 0 in tensor.shape else tensor.clone()


def contiguous(tensor: Tensor) -> Tensor:
    """Returns a tensor itself if it is contiguous, else a copy.

    Paddle's ``tensor.contiguous()`` would change the tensor itself, so that tensors which share its
    memory share it no longer.
    """
    return tensor if tensor.is_contiguous() else copy_of(tensor)


class MemoryLayout(NamedTuple):
    """Says where the elements of a tensor, which may be a view, are in its memory.

    Attributes:
        strides: The distance of two neighbours along each axis, in elements.
        offset: The bytes before the first element.
    """

    strides: tuple[int, ...]
    offset: int


def layout_of(tensor: Tensor) -> MemoryLayout:
    """Returns the memory layout of a tensor."""
    return MemoryLayout(tuple(tensor.strides), tensor.offset)


def with_layout(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Returns a tensor with a memory layout: ``tensor`` itself if it has the layout, else a copy.

    A copy is detached from the graph but, unlike a leaf, may be written into.
    """
    if 0 in tensor.shape or layout_of(tensor) == layout:
        return tensor
    with without_casts():
        ends = [(size - 1) * stride for size, stride in zip(tensor.shape, layout.strides)]
        length = layout.offset // tensor.element_size() + sum(max(end, 0) for end in ends) + 1
        memory = paddle.empty([length], tensor.dtype)
        view = (tensor.shape, layout.strides, layout.offset)
        paddle.assign(tensor.detach(), paddle.as_strided(memory, *view))
        memory.stop_gradient = tensor.stop_gradient
        return paddle.as_strided(memory, *view)


def release_memory(tensor: Tensor) -> None:
    """Frees the memory of a tensor; its shape stays."""
    tensor.get_tensor()._clear()


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors use the same memory."""
    return bool(tensor._is_shared_buffer_with(other))


@contextmanager
def without_memory(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Opens a context in which some tensors have no memory: Paddle refuses to compute with them."""
    saved = [(tensor, paddle.empty([0], tensor.dtype)) for tensor in tensors if has_memory(tensor)]
    for tensor, memory in saved:
        tensor._share_buffer_to(memory)
        release_memory(tensor)
    try:
        yield
    finally:
        for tensor, memory in saved:
            memory._share_buffer_to(tensor)


def is_missing_memory_error(error: BaseException) -> bool:
    """Returns whether an error is one of Paddle's for a tensor without memory."""
    text = f"{error} {error.__cause__}"
    return any(words in text for words in ("holds no memory", "not initialized", "has_allocation"))


def note_write(tensor: Tensor) -> None:
    """Increments a tensor's version, by which autograd notices that the values have changed."""
    tensor._bump_inplace_version()


def leaf_on_same_memory(tensor: Tensor) -> Tensor:
    """Returns a leaf of autograd's graph with the memory of ``tensor``.

    The memory stays until both are released.
    """
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
    """Removes the gradient of a parameter and returns it, without a copy; None without one.

    The gradient is ``main_grad``, in float32, if the parameter has one. A gradient of selected
    rows is returned, but not removed.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        parameter.main_grad = None
        return main_grad
    gradient = parameter.grad
    if gradient is None or gradient.is_selected_rows():
        return gradient
    # clear_gradient empties the gradient's tensor, but not a view of its memory.
    view = gradient.view(gradient.shape)
    parameter.clear_gradient(False)
    return view


def give_memory(source: Tensor, parameter: Tensor) -> None:
    """Makes ``parameter``, which has no memory yet, share that of ``source``, without a copy."""
    source._share_underline_tensor_to(parameter)


def parameter_on_same_memory(parameter: Tensor) -> Tensor:
    """Returns a new parameter with the memory and the attributes of ``parameter``.

    Its name and its gradient are its own.
    """
    other = _framework.EagerParamBase(
        parameter.shape, parameter.dtype, trainable=not parameter.stop_gradient
    )
    name = other.name
    vars(other).update(vars(parameter))
    other.name = name
    give_memory(parameter, other)
    return other


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a Parameter object, with all its attributes."""
    return isinstance(tensor, _framework.EagerParamBase)


class NoNumbersError(StateError):
    """An operation needs the values of a parameter, which another rank has."""


class ElsewhereParameter(_framework.EagerParamBase):
    """A parameter whose values only another rank has: methods that need values raise an error.

    Paddle itself would read nothing, or raise an error that names neither parameter nor cause.
    """

    def numel(self, name: str | None = None) -> Tensor:
        """Returns the number of elements; Paddle's own method needs the memory of the values."""
        return paddle.full([], math.prod(self.shape), "int64", name)

    def _require_values(self) -> None:
        """Raises NoNumbersError while the parameter has no values."""
        if not has_memory(self):
            raise NoNumbersError(
                "the numbers of this weight are on another rank, and on this one there are none",
                where=f"parameter {self.name!r}, of shape {list(self.shape)}",
                cause="fleetpipe.pipeline leaves each rank of a pipeline the weights of its stages",
                fix="read pipe.full_state_dict(), which every rank calls, and set by "
                "pipe.load_from(state); to copy the model, copy it before fleetpipe.pipeline",
            )


def _requiring_values(name: str) -> Callable[..., Any]:
    """Returns the method ``name`` of a parameter, which raises an error if there are no values."""
    original: Any = getattr(_framework.EagerParamBase, name)

    @functools.wraps(original)
    def method(self: ElsewhereParameter, *args: Any, **named: Any) -> Any:
        self._require_values()
        return original(self, *args, **named)

    return method


for _name in _METHODS_ON_VALUES:
    if inspect.isroutine(getattr(_Tensor, _name, None)):
        setattr(ElsewhereParameter, _name, _requiring_values(_name))


def refuse_values_of(parameter: Tensor) -> None:
    """Makes methods of a parameter that need its values raise an error while it has none."""
    parameter.__class__ = ElsewhereParameter


def run_backward(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Runs ``paddle.autograd.backward`` without its checks of the arguments.

    Between a forward and a backward the checks take 10 us, as their code is not in the caches.

    Args:
        tensors: The tensors to start from, each once.
        grads: The gradient of each tensor; None for a gradient of ones.
    """
    _eager.run_backward(tensors, grads, *_BACKWARD_OPTIONS)


def switch_gradients_on() -> None:
    """Turns gradients on: Paddle leaves them off after a hook has failed during backward."""
    framework: ModuleType = paddle.framework
    framework._dygraph_tracer()._has_grad = True


class SavedTensorHooks:
    """Replaces the tensors that autograd saves, as ``paddle.autograd.saved_tensors_hooks`` does.

    Within ``paddle.grad`` the hooks are off, since Paddle fails if hooks replace tensors of the
    graph for gradients of gradients.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        backward: Callable[..., None],
    ) -> None:
        """Creates the hooks; :meth:`begin` puts them into use.

        Args:
            pack: Takes a tensor that autograd saves; returns the object to save instead.
            unpack: Takes that object; returns the tensor.
            backward: Called instead of Paddle's ``run_backward``, with its arguments.
        """
        self._hooks = paddle.autograd.saved_tensors_hooks(pack, unpack)
        # Paddle's own functions, which are replaced between begin and end.
        self._grad: Callable[..., Any] = _eager.run_partial_grad
        self._backward, self._run_backward = backward, _eager.run_backward

    def begin(self) -> None:
        """Starts to use ``pack`` and ``unpack``, and to call ``backward`` in place of Paddle's."""
        self._hooks.__enter__()
        _eager.run_partial_grad, _eager.run_backward = self._grad_without_hooks, self._backward

    def end(self) -> None:
        """Stops using ``pack`` and ``unpack``; :meth:`begin` may follow again.

        Paddle's own functions behind ``grad`` and ``backward``, which :meth:`begin` has replaced,
        are put back.
        """
        self._hooks.__exit__()
        _eager.run_partial_grad, _eager.run_backward = self._grad, self._run_backward

    def _grad_without_hooks(self, *args: object) -> Any:
        """Runs ``paddle.grad`` with ``pack`` and ``unpack`` off; its arguments are Paddle's own."""
        self._hooks.__exit__()
        try:
            return self._grad(*args)
        finally:
            self._hooks.__enter__()


def is_for_pylayer() -> bool:
    """Returns whether the calling hook packs or unpacks a tensor that a ``PyLayer`` saves.

    For a ``PyLayer`` the hook must return a tensor with its graph; for an operation Paddle adds the
    graph itself. Only ``pack`` or ``unpack`` may call this, directly.
    """
    # Frame 1 is the hook, frame 2 the function of Paddle's that calls the hook.
    return sys._getframe(2).f_code in _PYLAYER_CODES


def saves_freely() -> bool:
    """Returns whether autograd saves tensors unchanged: no ``saved_tensors_hooks`` are in use."""
    try:
        # Paddle refuses hooks within other hooks.
        with paddle.autograd.saved_tensors_hooks(_ignore_gradient, _ignore_gradient):
            return True
    except ValueError:
        return False


def is_made_by_pylayer(tensor: Tensor) -> bool:
    """Returns whether a tensor is a result of a ``PyLayer``, whose graph Paddle never frees."""
    return str(tensor.grad_fn.name()).startswith("GradNodePyLayer")


def call_after_gradient(parameter: Tensor, function: Callable[..., None]) -> None:
    """Makes autograd call ``function()`` after each gradient that it adds to ``parameter``."""
    parameter._register_backward_hook(function)


def run_reduce_hooks(parameter: Tensor) -> None:
    """Runs the functions of :func:`call_after_gradient` for ``parameter``; on 3.x only."""
    parameter._apply_backward_hook()


def route_grad_hooks(
    put: Callable[[Tensor, Callable[[Tensor], object]], int], remove: Callable[[Tensor, int], bool]
) -> None:
    """Makes ``tensor.register_hook``, and ``remove`` of its result, call other functions.

    Args:
        put: Called with a tensor and a hook on its gradient; returns a number for the hook.
        remove: Called with the tensor and that number; returns whether it removed a hook.
    """
    _Tensor._register_grad_hook = put
    _Tensor._remove_grad_hook = remove


def watch_pylayers(
    note_forward: Callable[[type], object],
    running: Callable[[Any, Callable[..., Any]], AbstractContextManager[None]],
) -> None:
    """Makes the backward of each ``PyLayer`` run in a context; later calls change nothing.

    Args:
        note_forward: Called with the user's class in its forward; its result is stored for the
            backward.
        running: Returns the context of the backward, given the result of ``note_forward`` and the
            class's ``backward``.
    """
    backward_class: Any = PyLayerBackward
    if "__init__" in vars(backward_class):
        return
    original = backward_class.backward

    # Paddle creates an object of the class in the forward of each call, as its context.
    def init(context: Any) -> None:
        context.noted_forward = note_forward(context._forward_cls)

    def backward(context: Any, *grads: Any) -> Any:
        with running(context.noted_forward, context._forward_cls.backward):
            return original(context, *grads)

    backward_class.__init__, backward_class.backward = init, backward


def next_hook_number(parameter: Tensor) -> int:
    """Returns the number that a new hook on the gradient of ``parameter`` gets.

    It registers a hook and removes it. Paddle numbers the hooks of a parameter from 0, and uses no
    number twice.
    """
    number = put_grad_hook(parameter, _ignore_gradient)
    remove_grad_hook(parameter, number)
    return number


def _ignore_gradient(_grad: Tensor) -> None:
    """Stands for a hook that does nothing."""


def give_parameters_a_method(name: str, method: Callable[[Tensor, int], None]) -> None:
    """Gives all parameters a method: ``parameter.<name>(n)`` calls ``method(parameter, n)``."""
    setattr(_framework.EagerParamBase, name, method)
