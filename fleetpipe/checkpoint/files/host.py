"""The bytes of tensors in host memory: read where they lie, copied once, filled and assigned."""

from __future__ import annotations

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.checkpoint.contents.parts import Held
from fleetpipe.checkpoint.files.tensors import Described
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import TensorLeaf


def bytes_of(held: Held) -> tuple[object, memoryview]:
    """Returns the bytes of a tensor, without a copy where it is contiguous and on the CPU.

    Returns:
        What to keep as long as the bytes are used, and the bytes.
    """
    tensor = held.tensor
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor)
        return array, _flat(array)
    kept, memories = bridge.readable([tensor], [_leaf(_own(held))])
    return kept, memories[0] if memories else memoryview(b"")


def empty_like(held: Held) -> tuple[Tensor | np.ndarray, memoryview]:
    """Returns something like a tensor, and its bytes, which are to be filled."""
    if isinstance(held.tensor, np.ndarray):
        array = np.empty_like(held.tensor, order="C")
        return array, _flat(array)
    return empty(_own(held))


def empty(described: Described) -> tuple[Tensor, memoryview]:
    """Returns a tensor, and its bytes, which are to be filled."""
    (tensor,), memories = bridge.allocate([_leaf(described)])
    return tensor, memories[0] if memories else memoryview(b"")


def assign(held: Held, value: Tensor | np.ndarray) -> None:
    """Gives a tensor a value of :func:`empty_like`."""
    if isinstance(held.tensor, np.ndarray):
        held.tensor[...] = value
    else:
        with paddle.no_grad():
            held.tensor.set_value(value)


def _own(held: Held) -> Described:
    """Returns dtype and shape of what is here: a part may be smaller than the whole."""
    return Described(held.described.dtype, tuple(int(size) for size in held.tensor.shape))


def _leaf(described: Described) -> TensorLeaf:
    return TensorLeaf(described.dtype, described.shape, True)


def _flat(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
