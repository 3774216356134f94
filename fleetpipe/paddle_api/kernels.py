"""Operations without the checks of their public functions, which take as long as a small kernel.

The same in 2.6.2 and 3.3.x, except for :func:`mean_leaves_out_below_zero`. Autograd, automatic
casts and ``capture`` treat them like any other operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

from paddle import _C_ops

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import VERSION, paddle

#: Whether a gather by no index has a backward (3.x); on 2.6.2 it ends the process.
CAN_GATHER_NOTHING: bool = not VERSION.startswith("2.")

_matmul: Callable[..., Tensor] = _C_ops.matmul
_add: Callable[..., Tensor] = _C_ops.add
_expand: Callable[..., Tensor] = _C_ops.expand
_reshape: Callable[..., Tensor] = _C_ops.reshape

# As a module: Paddle's types lack a name of it.
_paddle: ModuleType = paddle

#: ``linear(x, weight, bias)``; for a GPU Paddle chooses among several.
linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
    _paddle.nn.functional.linear if _paddle.is_compiled_with_cuda() else _C_ops.linear
)


#: ``add_in_place(left, right)`` adds ``right`` to ``left``, which has its shape and dtype.
add_in_place: Callable[[Tensor, Tensor], Tensor] = _C_ops.add_


def product(
    left: Tensor, right: Tensor, left_transposed: bool = False, right_transposed: bool = False
) -> Tensor:
    """Returns ``left @ right``, either of them transposed first if asked for."""
    return _matmul(left, right, left_transposed, right_transposed)


def total(left: Tensor, right: Tensor) -> Tensor:
    """Returns ``left + right``."""
    return _add(left, right)


def expand(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Broadcasts a tensor to ``shape``."""
    return _expand(tensor, shape)


def reshape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshapes a tensor to ``shape``."""
    return _reshape(tensor, shape)


@cache
def mean_leaves_out_below_zero() -> bool:
    """Whether the mean of a cross-entropy ignores positions of a negative ``ignore_index``.

    2.6.2 divides by the positions that count, 3.3.x by all.
    """
    labels = paddle.to_tensor([0, -100])
    loss = paddle.nn.functional.cross_entropy(paddle.zeros([2, 2]), labels, ignore_index=-100)
    # Log 2, or half of that.
    return float(loss) > 0.5
