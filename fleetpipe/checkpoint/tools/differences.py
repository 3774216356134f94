"""Compares two checkpoints bit by bit, and says where they begin to differ."""

from __future__ import annotations

import numpy as np

from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.checkpoint.files.reader import StepReader
from fleetpipe.checkpoint.files.tensors import CODES, Described

#: Names that only one has are told up to this many.
_MOST_SHOWN = 5


def differences(one: StepReader, other: StepReader) -> list[str]:
    """Returns lines about what is not the same: none where all tensors have the same bits."""
    left, right = one.manifest.tensors, other.manifest.tensors
    lines = []
    for mine, beside, which in ((left, right, "first"), (right, left, "second")):
        only = [str(name) for name in mine if name not in beside]
        if only:
            more = f" and {len(only) - _MOST_SHOWN} more" * (len(only) > _MOST_SHOWN)
            lines.append(f"only the {which} has {', '.join(only[:_MOST_SHOWN])}{more}")
    common = [name for name in left if name in right]
    differing = [name for name in common if _differ(one, other, name)]
    if differing:
        lines.append(f"{differing[0]} differs first: {_first_difference(one, other, differing[0])}")
        lines.append(f"{len(differing)} of {len(common)} tensors differ")
    return lines


def _differ(one: StepReader, other: StepReader, name: TensorName) -> bool:
    if one.manifest.tensors[name].tensor != other.manifest.tensors[name].tensor:
        return True
    return _bytes(one, name) != _bytes(other, name)


def _bytes(reader: StepReader, name: TensorName) -> bytearray:
    memory = bytearray(reader.manifest.tensors[name].tensor.nbytes)
    with reader.opened() as read:
        read(name, None, memoryview(memory))
    return memory


def _first_difference(one: StepReader, other: StepReader, name: TensorName) -> str:
    left, right = (reader.manifest.tensors[name].tensor for reader in (one, other))
    if left != right:
        return f"{left} and {right}"
    bits = [
        np.frombuffer(_bytes(reader, name), f"u{left.itemsize}").reshape(left.shape)
        for reader in (one, other)
    ]
    places = np.argwhere(bits[0] != bits[1])
    place = tuple(int(index) for index in places[0])
    numbers = [_number(of[place], left) for of in bits]
    return (
        f"{len(places)} of {bits[0].size} elements, the first at {list(place)}: "
        f"{numbers[0]!r} and {numbers[1]!r}"
    )


def _number(bits: np.generic, tensor: Described) -> float | str:
    """Returns the value of an element; the bits of one that NumPy has no dtype for."""
    if tensor.dtype == "bfloat16":
        return float(np.array(int(bits) << 16, "uint32").view("float32"))
    code = CODES[tensor.dtype][0]
    if code.startswith("F8_"):
        return f"{int(bits):#04x}"
    value: float = bits.view(np.dtype(tensor.dtype)).item()
    return value
