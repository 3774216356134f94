"""Reads, copies, allocates and assigns the bytes of tensors in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleetpipe import systems
from fleetpipe.aliases import Tensor
from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.mesh.parts import Described, LocalTensor
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import TensorLeaf

_ALIGNED = 64


def bytes_of(local: LocalTensor) -> memoryview:
    """Returns the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    tensor = local.tensor
    if isinstance(tensor, np.ndarray):
        return _flat(np.ascontiguousarray(tensor))
    kept, memories = bridge.readable([tensor], [_part_of(local)])
    if not memories:
        return memoryview(b"")
    (memory,) = memories
    owner: Any = memory.obj
    owner.kept = kept  # a copy lives as long as its bytes are used
    return memory


def empty_like(local: LocalTensor) -> tuple[Tensor | np.ndarray, memoryview]:
    """Returns an empty tensor with the shape and dtype of ``local``, and its memory to fill."""
    if isinstance(local.tensor, np.ndarray):
        array = np.empty_like(local.tensor, order="C")
        return array, _flat(array)
    return empty(_part_of(local))


def empty(described: Described) -> tuple[Tensor, memoryview]:
    """Returns an empty tensor, and its memory to fill."""
    leaf = TensorLeaf(described.dtype, described.shape, True)
    (tensor,), memories = bridge.allocate([leaf])
    return tensor, memories[0] if memories else memoryview(bytearray())


def assign(local: LocalTensor, value: Tensor | np.ndarray) -> None:
    """Copies a filled tensor of :func:`empty_like` into the tensor itself."""
    if isinstance(local.tensor, np.ndarray):
        local.tensor[...] = value
    else:
        with paddle.no_grad():
            local.tensor.set_value(value)


class Snapshot:
    """Copies of tensors' bytes at one moment."""

    def __init__(self) -> None:
        self._places: dict[TensorName, np.ndarray] = {}

    def take(self, tensors: Mapping[TensorName, LocalTensor]) -> Mapping[TensorName, memoryview]:
        """Copies tensors over the previous copies, and returns the copies' bytes."""
        memories = {name: bytes_of(local) for name, local in tensors.items()}
        sizes = {name: len(memory) for name, memory in memories.items()}
        if {name: len(place) for name, place in self._places.items()} != sizes:
            self._places = _allocate(sizes)
        for name, memory in memories.items():
            self._places[name][:] = np.frombuffer(memory, np.uint8)
        return {name: place.data for name, place in self._places.items()}


def _part_of(local: LocalTensor) -> Described:
    """Returns dtype and shape of the part that is here."""
    return Described(local.described.dtype, tuple(int(size) for size in local.tensor.shape))


def _flat(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _allocate(sizes: Mapping[TensorName, int]) -> dict[TensorName, np.ndarray]:
    """Allocates memory for tensors in one piece, for which the system can use large pages."""
    ends, end = {}, 0
    for name, size in sizes.items():
        ends[name] = end = end + size
        end = -(-end // _ALIGNED) * _ALIGNED
    whole = np.frombuffer(systems.anonymous_memory(max(end, 1)), np.uint8)
    return {name: whole[ends[name] - size : ends[name]] for name, size in sizes.items()}
