"""Tensors: memory, gradients and the hooks on them.

The names hold for 2.6.2 and 3.3.x but for these: ``_apply_backward_hook`` and
``_unsafe_share_buffer_to`` are 3.x's alone, and ``run_backward`` takes one argument more there.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from paddle import _C_ops
from paddle.base import core
from paddle.base import framework as _framework

from fleetpipe.aliases import DType, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import expected_place, synchronize

_Tensor: Any = core.eager.Tensor
_eager: Any = core.eager
#: What ``run_backward`` of Paddle's takes behind the graph's roots: whether to keep the graph and,
#: on 3.x, where to draw it.
_PLAINLY: tuple[object, ...] = (
    (False, None)
    if "dump_backward_graph_path" in inspect.signature(paddle.autograd.backward).parameters
    else (False,)
)
#: Whether what runs behind each gradient of a parameter can be run (3.x), as autograd does.
CAN_RUN_REDUCE_HOOKS = hasattr(paddle.Tensor, "_apply_backward_hook")
#: Puts a hook on the gradient of a tensor, and returns its number; removes the one with a number.
put_grad_hook: Callable[[Tensor, Callable[[Tensor], object]], int] = _Tensor._register_grad_hook
remove_grad_hook: Callable[[Tensor, int], bool] = _Tensor._remove_grad_hook


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers."""
    # Not tensor.size: Paddle asks NumPy for that, which takes as long as a small layer.
    return int(math.prod(tensor.shape)) * int(tensor.element_size())


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory, when all that it is computed from is.

    ``cpu()`` waits for every stream of a card: for what is sent, too, until a peer takes it.
    """
    # Without its graph, which may go with what is copied, in a thread of CUDA's: a PyLayer's part
    # of it takes Python's lock.
    copied: Tensor = tensor.detach()._copy_to(core.CPUPlace(), False)
    synchronize()
    return copied


def to_device(tensor: Tensor) -> Tensor:
    """Returns a copy on the device that computes, before what is computed next.

    ``to()`` waits for every stream of a card, and on 2.6.2 moves the tensor that it is asked of.
    """
    copied: Tensor = tensor._copy_to(expected_place(), False)
    return copied


def empty_on_host(shape: Sequence[int], dtype: DType) -> Tensor:
    """Returns a tensor of any numbers in the host's memory, which is Paddle's own."""
    made: Tensor = _C_ops.empty([*shape], dtype, core.CPUPlace())
    return made


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a value: an LSTM keeps a buffer that never gets one on CPU."""
    return bool(tensor._is_initialized())


def initializer_of(parameter: Tensor) -> Any:
    """Returns what is to draw a parameter of ``paddle.LazyGuard``; None once it has been drawn.

    It draws a part as it would draw the whole: Xavier's otherwise goes by the shape of the part.
    """
    if parameter._init_func is None:
        return None
    initializer = copy.copy(parameter._init_func.func.__self__)
    for fan, size in zip(("_fan_in", "_fan_out"), parameter.shape):
        if hasattr(initializer, "_fan_out") and getattr(initializer, fan) is None:
            setattr(initializer, fan, size)
    return initializer


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same numbers and the same graph, in memory of its own."""
    if tensor.is_selected_rows():
        # Paddle clones no gradient of some rows alone; 2.6.2 dies of it.
        return paddle.scale(tensor, 1.0)
    # Paddle 2.6.2 clones none without elements, into which nobody writes.
    return tensor if 0 in tensor.shape else tensor.clone()


def release_memory(tensor: Tensor) -> None:
    """Gives back the memory of a tensor, which keeps its shape."""
    tensor.get_tensor()._clear()


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return bool(tensor._is_shared_buffer_with(other))


@contextmanager
def out_of_reach(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within it tensors have no memory: Paddle refuses to compute with them."""
    kept = [(tensor, paddle.empty([0], tensor.dtype)) for tensor in tensors if has_memory(tensor)]
    for tensor, memory in kept:
        tensor._share_buffer_to(memory)
        release_memory(tensor)
    try:
        yield
    finally:
        for tensor, memory in kept:
            memory._share_buffer_to(tensor)


def is_out_of_reach(error: BaseException) -> bool:
    """Whether an error is Paddle's of a tensor without memory."""
    said = f"{error} {error.__cause__}"
    return any(words in said for words in ("holds no memory", "not initialized", "has_allocation"))


def note_write(tensor: Tensor) -> None:
    """Has a tensor's version say that it was written into."""
    tensor._bump_inplace_version()


def same_memory(tensor: Tensor) -> Tensor:
    """Returns a leaf of the graph that shares memory and may be emptied on its own."""
    if hasattr(tensor, "_unsafe_share_buffer_to"):
        other = tensor.detach()
    else:
        # On 2.6.2 a detached tensor is the same inside, and to unpack it for autograd empties it.
        kind = core.VarDesc.VarType.LOD_TENSOR
        other = core.eager.Tensor(tensor.dtype, tensor.shape, "", kind, False)
        tensor._share_buffer_to(other)
    other.stop_gradient = tensor.stop_gradient
    return other


def give_memory(source: Tensor, parameter: Tensor) -> None:
    """Makes ``parameter``, which has no memory yet, hold what ``source`` holds, without a copy."""
    source._share_underline_tensor_to(parameter)


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, with all that is attached to it."""
    return isinstance(tensor, _framework.EagerParamBase)


def run_backward(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Does what ``paddle.autograd.backward`` does, without its checks of the arguments.

    Between a forward and a backward they take 10 us, as nothing of them is in the caches.

    Args:
        tensors: Where to start, each once.
        grads: The gradient of each; None for ones.
    """
    _eager.run_backward(tensors, grads, *_PLAINLY)


def switch_gradients_on() -> None:
    """Undoes that Paddle leaves gradients off where a hook failed in the middle of backward."""
    framework: ModuleType = paddle.framework
    framework._dygraph_tracer()._has_grad = True


class SavedBy:
    """Does what ``paddle.autograd.saved_tensors_hooks`` does, but not within ``paddle.grad``.

    The graph that it makes there for gradients of gradients saves what it needs as it is: Paddle
    fails where hooks take some of that.
    """

    def __init__(
        self,
        pack: Callable[[Tensor], object],
        unpack: Callable[[Any], Tensor],
        backward: Callable[..., None],
    ) -> None:
        """Has ``pack`` say what is saved of a tensor, and ``unpack`` give the tensor back.

        Args:
            pack: The one.
            unpack: The other.
            backward: Is called in the place of a backward.
        """
        self._hooks = paddle.autograd.saved_tensors_hooks(pack, unpack)
        self._grad: Callable[..., Any] = _eager.run_partial_grad
        self._backward, self._run_backward = backward, _eager.run_backward

    def begin(self) -> None:
        """Has autograd save so from here on."""
        self._hooks.__enter__()
        _eager.run_partial_grad, _eager.run_backward = self._freely, self._backward

    def end(self) -> None:
        """Has it save tensors as they are; may be followed by another :meth:`begin`."""
        self._hooks.__exit__()
        _eager.run_partial_grad, _eager.run_backward = self._grad, self._run_backward

    def _freely(self, *args: object) -> Any:
        self._hooks.__exit__()
        try:
            return self._grad(*args)
        finally:
            self._hooks.__enter__()


#: The code of ``ctx.save_for_backward``, and of ``ctx.saved_tensor``, of a ``PyLayer``.
_PYLAYER_CODES = [
    getattr(paddle.autograd.PyLayerContext, name).__code__
    for name in ("save_for_backward", "saved_tensor")
]


def is_for_pylayer() -> bool:
    """Whether the caller was called to pack or unpack what a ``PyLayer`` saves.

    It gets the very tensor back, with its graph, which Paddle adds to what operations saved.
    """
    return sys._getframe(2).f_code in _PYLAYER_CODES


def saves_freely() -> bool:
    """Whether autograd saves tensors as they are: no ``saved_tensors_hooks`` are open."""
    try:
        with paddle.autograd.saved_tensors_hooks(_no_change, _no_change):
            return True
    except ValueError:
        return False


def is_made_by_pylayer(tensor: Tensor) -> bool:
    """Whether a tensor is what a ``PyLayer`` returned. Paddle never lets go of the graph's node."""
    return str(tensor.grad_fn.name()).startswith("GradNodePyLayer")


def call_after_gradient(parameter: Tensor, function: Callable[..., None]) -> None:
    """Has ``function`` called whenever a gradient has been added to ``parameter``."""
    parameter._register_backward_hook(function)


def run_reduce_hooks(parameter: Tensor) -> None:
    """Runs what was registered to run whenever a gradient has been added to ``parameter``."""
    parameter._apply_backward_hook()


def route_grad_hooks(
    put: Callable[[Tensor, Callable[[Tensor], object]], int], remove: Callable[[Tensor, int], bool]
) -> None:
    """Has ``tensor.register_hook``, and ``remove`` of what it returns, call these from now on."""
    _Tensor._register_grad_hook = put
    _Tensor._remove_grad_hook = remove


def number_of_hook(parameter: Tensor) -> int:
    """Puts a hook on the gradient of ``parameter`` and removes it; returns its number.

    Paddle counts them from 0 for each parameter, removed ones too.
    """
    number = put_grad_hook(parameter, _no_change)
    remove_grad_hook(parameter, number)
    return number


def _no_change(_grad: Tensor) -> None:
    return None


def give_parameters_a_method(name: str, method: Callable[[Tensor, int], None]) -> None:
    """Makes ``parameter.name(stage)`` a call of ``method(parameter, stage)``."""
    setattr(_framework.EagerParamBase, name, method)
