"""Splits values into their structure and tensors, and gives access to the tensors' memory.

Nothing is copied, on 2.6.2 and 3.3.x: a sent tensor is read in place; a received one is allocated
first and filled from the socket.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from paddle import Tensor as Tensor
from paddle.utils import dlpack

from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind, dynamic_mode
from fleetpipe.paddle_api.tensor import contiguous, empty_on_host, tensor_bytes, to_device, to_host
from fleetpipe.transport.wire.structure import DEEPEST, MOST_PARTS, SIZES, Route, TensorLeaf, Tree

#: The name of each dtype of this Paddle. 2.6.2 has "uint16" as another name of bfloat16, and
#: neither float8 nor the larger uints.
NAMES: dict[Any, str] = {
    getattr(paddle, name): name
    for name in ("uint16", *SIZES)
    if isinstance(getattr(paddle, name, None), type(paddle.float32))
}
#: The dtype of each name.
DTYPES = {name: dtype for dtype, name in NAMES.items()}
#: The dtypes that NCCL sends in each version of Paddle: no int16, no complex, and only uint8.
_OF_NCCL = frozenset(
    DTYPES[name]
    for name in (
        *("float16", "bfloat16", "float32", "float64"),
        *("int8", "int32", "int64", "uint8", "bool"),
    )
)

#: The most bytes of a tensor that is allocated by copying another one: that takes 1.3 us, a third
#: of the time of paddle.empty.
_SMALL = 1 << 14
#: The fewest bytes of a tensor that NumPy allocates. Paddle's allocator gives large blocks back to
#: the system each time they are freed, so that every page of the next one is touched for the first
#: time: 2.0 ms for 4 MiB. NumPy's takes 0.1 ms.
_LARGE = 1 << 20
#: For dtypes that NumPy or a version of Paddle lacks, a dtype of the same size to allocate instead.
_CARRIERS = {"bfloat16": "int16", "bool": "uint8", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_CARRIERS.update(uint16="int16", uint32="int32", uint64="int64")
#: The memory of a tensor without data.
_EMPTY = memoryview(bytearray())
_Result = TypeVar("_Result")

#: The values that can cross, for error messages.
ALLOWED = (
    "a dense Tensor of any dtype, None, bool, int, float, str, or a tuple, list or dict with "
    "str keys of these"
)

#: The indices and keys that lead from a value to a part of it.
_Path = tuple[object, ...]


def _in_dynamic_mode(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Makes ``function`` run in dynamic graph mode even if static mode is on.

    In static mode ``detach`` of a dynamic tensor crashes and ``empty`` adds to the program.
    """

    @functools.wraps(function)
    def run(*args: Any) -> _Result:
        if paddle.in_dynamic_mode():
            return function(*args)
        with dynamic_mode():
            return function(*args)

    return run


@_in_dynamic_mode
def detach(tensors: list[Tensor]) -> list[Tensor]:
    """Returns detached tensors with the data and the ``stop_gradient`` of ``tensors``."""
    leaves = [tensor.detach() for tensor in tensors]
    for leaf, tensor in zip(leaves, tensors):
        leaf.stop_gradient = tensor.stop_gradient
    return leaves


class _Sized(Protocol):
    """An object that tells the number of bytes of a tensor in its attribute ``nbytes``."""

    @property
    def nbytes(self) -> int: ...


def readable(
    tensors: list[Tensor], leaves: Iterable[_Sized]
) -> tuple[list[Tensor], list[memoryview]]:
    """Gives access to the bytes of tensors.

    Args:
        tensors: The tensors.
        leaves: For each tensor, an object with its number of bytes.

    Returns:
        Tensors to keep alive as long as the bytes are read, and for each tensor with data its
        bytes: its own memory if it is contiguous and on the CPU.
    """
    # A detached tensor keeps the data alive when the stage clears its own tensor.
    kept = plain(detach(tensors))
    return kept, memories(kept, leaves)


def plain(tensors: list[Tensor]) -> list[Tensor]:
    """Returns contiguous CPU tensors with the data of ``tensors``.

    A tensor that is contiguous and on the CPU is returned itself; of others, copies.
    """
    plain_tensors = []
    for tensor in tensors:
        is_plain = tensor.place.is_cpu_place() and tensor.is_contiguous()
        plain_tensors.append(tensor if is_plain else _copy_plain(tensor))
    return plain_tensors


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors have equal shapes, dtypes and bits; copies no CPU tensors."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # Referenced as long as their bytes are read.
    kept = plain([first, second])
    left, right = (np.frombuffer(_memory_of(t, tensor_bytes(t)), "uint8") for t in kept)
    # In parts: NumPy allocates an array for each comparison.
    parts = (slice(start, start + _LARGE) for start in range(0, left.size, _LARGE))
    return all(np.array_equal(left[part], right[part]) for part in parts)


@_in_dynamic_mode
def checksum(tensors: Iterable[Tensor]) -> int:
    """Returns a checksum of 32 bits of all bytes of some tensors, in order.

    Of a tensor on a GPU it covers two sums of its bytes, which the GPU computes.

    Args:
        tensors: The tensors; each has data.
    """
    crc = 0
    for tensor in tensors:
        if not tensor.place.is_cpu_place():
            tensor = _sum_bytes(tensor)
        kept = tensor if tensor.is_contiguous() else contiguous(tensor.detach())
        crc = zlib.crc32(_memory_of(kept, tensor_bytes(kept)), crc)
    return crc


def _sum_bytes(tensor: Tensor) -> Tensor:
    """Returns the sum of a GPU tensor's bytes and one weighted by position, as a CPU tensor."""
    (flat,) = flat_bytes([tensor])
    numbers = (flat if flat.shape[0] % 4 else flat.view("int32")).astype("int64")
    positions = paddle.arange(1, numbers.shape[0] + 1, dtype="int64")
    return paddle.stack([numbers.sum(), (numbers * positions).sum()]).cpu()


def memories(tensors: list[Tensor], leaves: Iterable[_Sized]) -> list[memoryview]:
    """Returns the bytes of each tensor that has data.

    Args:
        tensors: The result of :func:`plain`; they must stay alive as long as the bytes are used.
        leaves: For each tensor, an object with its number of bytes.
    """
    buffers = []
    for tensor, leaf in zip(tensors, leaves):
        if leaf.nbytes:  # without a call of _memory_of: each message takes this path
            block = _byte_array(leaf.nbytes).from_address(tensor.data_ptr())
            buffers.append(memoryview(block).cast("B"))
    return buffers


def allocate(leaves: Sequence[TensorLeaf]) -> tuple[list[Tensor], list[memoryview]]:
    """Returns a new CPU tensor for each leaf, and of those with data the bytes to fill."""
    return allocate_several(leaves, 1)[0]


@_in_dynamic_mode
def allocate_several(
    leaves: Sequence[TensorLeaf], messages: int
) -> list[tuple[list[Tensor], list[memoryview]]]:
    """Returns the result of :func:`allocate` for each of ``messages`` messages."""
    on_cpu, allocated = device_kind() == "cpu", []
    for _ in range(messages):
        tensors = []
        for leaf in leaves:
            tensor = _allocate_tensor(leaf, on_cpu)
            tensor.stop_gradient = leaf.stop_gradient
            tensors.append(tensor)
        allocated.append((tensors, memories(tensors, leaves)))
    return allocated


@_in_dynamic_mode
def flat_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """Returns of each tensor with data a one-dimensional view of its bytes, on its device."""
    compact = [contiguous(tensor.detach()) for tensor in tensors if 0 not in tensor.shape]
    # A view as bytes of a slice would begin elsewhere: Paddle multiplies its offset too.
    compact = [tensor.clone() if tensor.offset else tensor for tensor in compact]
    return [tensor.reshape([-1]).view("uint8") for tensor in compact]


def byte_buffers(leaves: Iterable[TensorLeaf]) -> list[Tensor]:
    """Returns CPU tensors of bytes in which the tensors of :func:`flat_bytes` can be received.

    The tensors are created without an operation of Paddle's, so any thread can do it in any mode.

    Args:
        leaves: The dtypes and shapes of the tensors; those without data get no buffer.
    """
    sizes = [leaf.nbytes for leaf in leaves if leaf.nbytes]
    return [dlpack.from_dlpack(np.empty(size, "uint8").__dlpack__()) for size in sizes]


@_in_dynamic_mode
def from_bytes(buffers: list[Tensor], leaves: Sequence[TensorLeaf]) -> list[Tensor]:
    """Returns the tensors whose bytes are in the filled :func:`byte_buffers`."""
    flat = iter(buffers)
    tensors = [
        _view_as(next(flat), leaf.dtype) if leaf.nbytes else empty_like([leaf])[0]
        for leaf in leaves
    ]
    return reshape(tensors, leaves)


def _view_as(flat: Tensor, dtype: str) -> Tensor:
    """Returns one-dimensional bytes as numbers of a dtype.

    On 2.6.2, whose view to a wider dtype crashes, that is a copy.
    """
    if paddle.version.major == "2":
        flat = paddle.to_tensor(flat.numpy().view(_CARRIERS.get(dtype, dtype)))
    return flat.view(DTYPES[dtype])


@_in_dynamic_mode
def empty_like(leaves: Iterable[TensorLeaf]) -> list[Tensor]:
    """Returns a tensor for each leaf on the computing device, to fill through :func:`carriers`."""
    # A tensor without dimensions has no view as bytes.
    return [paddle.empty(leaf.shape or (1,), DTYPES[leaf.dtype]) for leaf in leaves]


@_in_dynamic_mode
def carriers(tensors: list[Tensor]) -> list[Tensor]:
    """Returns of each tensor with data the contiguous tensor that NCCL sends or fills.

    That is the tensor itself, or its bytes if NCCL does not support its dtype; a tensor in the
    host's memory is copied to the device.
    """
    compact = [_move_to_device(tensor.detach()) for tensor in tensors if 0 not in tensor.shape]
    return [tensor if tensor.dtype in _OF_NCCL else flat_bytes([tensor])[0] for tensor in compact]


def _move_to_device(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor with the data on the computing device; copies only if needed."""
    by_host = tensor.place.is_cpu_place() or tensor.place.is_cuda_pinned_place()
    moved = to_device(tensor) if by_host and device_kind() != "cpu" else tensor
    compact: Tensor = contiguous(moved)
    return compact


@_in_dynamic_mode
def reshape(tensors: list[Tensor], leaves: Iterable[TensorLeaf]) -> list[Tensor]:
    """Returns received tensors with the dimensions and ``stop_gradient`` of the sender's tensors.

    Args:
        tensors: The received tensors; one without dimensions may have been received as one number.
        leaves: For each tensor, the shape and ``stop_gradient`` of the sender's tensor.
    """
    reshaped = []
    for tensor, leaf in zip(tensors, leaves):
        reshaped.append(tensor if tensor.ndim == len(leaf.shape) else tensor.reshape(leaf.shape))
        reshaped[-1].stop_gradient = leaf.stop_gradient
    return reshaped


def on_device(tensors: list[Tensor], leaves: Iterable[TensorLeaf]) -> list[Tensor]:
    """Moves received tensors to the device that Paddle computes on, unless that is the CPU.

    Args:
        tensors: CPU tensors with the received data.
        leaves: For each tensor, the shape and ``stop_gradient`` of the sender's tensor, which the
            moved tensor gets, too.
    """
    if device_kind() == "cpu":
        return tensors
    return reshape([to_device(tensor) for tensor in tensors], leaves)


@_in_dynamic_mode
def _copy_plain(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor on the CPU."""
    kept = tensor.detach()
    plain: Tensor = contiguous(kept if kept.place.is_cpu_place() else to_host(kept))
    return plain


def _allocate_tensor(leaf: TensorLeaf, on_cpu: bool) -> Tensor:
    """Returns a new tensor in the host's memory.

    Args:
        leaf: The dtype and the shape.
        on_cpu: Whether Paddle computes on the CPU.
    """
    carrier = _CARRIERS.get(leaf.dtype, leaf.dtype)
    if not on_cpu:
        # Not NumPy's: Paddle may free it in CUDA's own thread, which would wait for Python's lock.
        tensor: Tensor = empty_on_host(leaf.shape, DTYPES[carrier])
    elif 0 < leaf.nbytes <= _SMALL:
        return _tensor_to_clone(leaf.dtype, leaf.shape).clone()
    elif not (leaf.nbytes >= _LARGE and _import_shares()):
        return paddle.empty(leaf.shape, DTYPES[leaf.dtype])
    else:
        tensor = dlpack.from_dlpack(np.empty(leaf.shape, carrier).__dlpack__())
    return tensor.view(DTYPES[leaf.dtype]) if leaf.dtype in _CARRIERS else tensor


@functools.lru_cache(maxsize=256)
def _tensor_to_clone(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a small tensor, made once for each dtype and shape, that new ones are copies of."""
    # Not empty: Paddle's check for NaN looks at each clone, and memory may hold anything.
    return paddle.zeros(shape, DTYPES[dtype])


@functools.cache
def _import_shares() -> bool:
    """Returns whether this Paddle imports an array without a copy: 3.3 does, 2.6 does not."""
    array = np.zeros(64, "uint8")
    return bool(dlpack.from_dlpack(array.__dlpack__()).data_ptr() == array.ctypes.data)


def _memory_of(tensor: Tensor, nbytes: int) -> memoryview:
    """Returns the memory of a plain tensor of ``nbytes`` bytes, which must stay alive."""
    if not nbytes:
        return _EMPTY
    return memoryview(_byte_array(nbytes).from_address(tensor.data_ptr())).cast("B")


@functools.lru_cache(maxsize=1024)
def _byte_array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Returns the ctypes type of ``nbytes`` bytes, made once for each size."""
    return ctypes.c_ubyte * nbytes


class Unfit(Exception):
    """Says that a part of a value cannot cross to another stage.

    :meth:`error` makes a BoundaryError of it once the message is known.
    """

    def __init__(self, path: _Path, got: str) -> None:
        """Stores the path to the part, and ``got``, a text that says what the part is."""
        super().__init__(path, got)
        self._path = path
        self._got = got

    def error(self, route: Route) -> BoundaryError:
        """Returns the error that names the part and the message."""
        part = "value" + "".join(f"[{step!r}]" for step in self._path)
        return BoundaryError(
            f"{part} cannot cross to another stage",
            where=str(route),
            expected=ALLOWED,
            got=self._got,
            fix="hand over what the next stage needs in these types, or make it in that stage",
        )


def take_apart(value: Any) -> tuple[Tree, list[Tensor]]:
    """Splits a value into its structure and its tensors, in the order of the structure.

    Raises:
        Unfit: Something in the value cannot cross.
    """
    if isinstance(value, Tensor):
        return _describe_tensor(value, ()), [value]
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Tensor):
        # What goes back over an edge of one tensor: the walk would take as long as the rest.
        return ("tuple", _describe_tensor(value[0], (0,))), [value[0]]
    walk = _Walk()
    return walk.tree(value, (), DEEPEST), walk.tensors


class _Walk:
    """Collects the tensors of a value, and counts its parts."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._parts = 0

    def tree(self, value: Any, path: _Path, depth: int) -> Tree:
        """Returns the structure of one part of the value; types must match exactly.

        Args:
            value: The part.
            path: The indices and keys that lead to it.
            depth: How many more levels may be nested in it.

        Raises:
            Unfit: It has a type that cannot cross, or is too large.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _describe_tensor(value, path)
        if value is None:
            return ("none",)
        if kind is bool or kind is str:
            return (kind.__name__, value)
        if kind is int:
            return ("int", hex(value))
        if kind is float:
            # Text, because nan differs from itself and 0.0 equals -0.0.
            return ("float", repr(value))
        if kind is tuple or kind is list:
            self._count_parts(len(value), path, depth)
            return (
                kind.__name__,
                *[self.tree(part, (*path, i), depth - 1) for i, part in enumerate(value)],
            )
        if kind is dict:
            self._count_parts(len(value), path, depth)
            return ("dict", *[self._dict_entry(item, path, depth) for item in value.items()])
        raise Unfit(path, f"an object of type {_type_name(kind)}")

    def _dict_entry(self, item: tuple[Any, Any], path: _Path, depth: int) -> Tree:
        """Returns the key of a dict's entry, and the structure of its value."""
        key, part = item
        if type(key) is not str:
            raise Unfit(path, f"a dict with the key {key!r:.60} of type {_type_name(type(key))}")
        return (key, self.tree(part, (*path, key), depth - 1))

    def _count_parts(self, parts: int, path: _Path, depth: int) -> None:
        """Counts the parts of a tuple, list or dict; refuses too many, or too deep a nesting."""
        self._parts += parts
        if not depth:
            raise Unfit(path[:3], f"parts nested more than {DEEPEST} deep (within themselves?)")
        if self._parts > MOST_PARTS:
            raise Unfit((), f"more than {MOST_PARTS} parts")


def _describe_tensor(tensor: Tensor, path: _Path) -> Tree:
    """Returns the structure of a tensor; refuses one whose data cannot be read."""
    shape = tuple(tensor.shape)
    dtype = NAMES.get(tensor.dtype)
    if not tensor.is_dense():
        raise Unfit(path, "a Tensor that is not dense: SelectedRows, sparse, distributed or freed")
    if dtype is None:
        raise Unfit(path, f"a Tensor of dtype {tensor.dtype}")
    if not tensor.data_ptr() and 0 not in shape:
        raise Unfit(path, f"a Tensor of shape {list(shape)} without data: it was freed")
    return ("tensor", dtype, shape, tensor.stop_gradient)


def _type_name(kind: type) -> str:
    """Returns the name of a class with its module, for error messages."""
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
