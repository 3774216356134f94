"""The structure of a value without the data of its tensors: a tree that can be sent.

The tree is of plain tuples, so that two are compared by ``==``: ("tensor", dtype, shape,
stop_gradient), ("none",), ("bool", x), ("int", hex), ("float", repr), ("str", x),
("tuple", child...), ("list", child...) and ("dict", (key, child)...).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from fleetpipe import systems
from fleetpipe.errors import BoundaryError, TransportError
from fleetpipe.json_value import parse_small
from fleetpipe.transport.wire.message import LARGEST_ANNOUNCEMENT, LARGEST_PAYLOAD, Route

Tree = tuple[Any, ...]

DEEPEST = 64
MOST_PARTS = 1 << 16
# Of a tensor, in any version of Paddle's.
MOST_DIMENSIONS = 9
_LARGEST_SIZE = 2**63 - 1
# A part is a list; a tensor has one of its sizes besides, and an entry of a dict is one.
_MOST_LISTS = 2 + 3 * MOST_PARTS
_MOST_STRINGS = 2 * _MOST_LISTS
_DEEPEST_LIST = 2 + 2 * (DEEPEST + 1)
_MEMORY_BYTES = systems.memory_bytes()
_LONGEST_FLOAT = 32
# Bytes of one element of each dtype that Paddle has in one version or another.
SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": lambda text: int(text, 16),
    "float": float,
    "str": str,
}


class TensorLeaf:
    """The facts about a tensor that are known before its data.

    Attributes:
        dtype: Name of the dtype, as Paddle spells it.
        shape: The shape; () for one number.
        stop_gradient: Whether the sender's tensor takes no gradient.
        nbytes: Bytes of its data.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], stop_gradient: bool) -> None:
        self.dtype = dtype
        self.shape = shape
        self.stop_gradient = stop_gradient
        self.nbytes = SIZES[dtype] * math.prod(shape)


class Structure:
    """A tree with the sizes and dtypes of its tensors, for sending and receiving.

    Attributes:
        tree: The tree.
        leaves: Its tensors, in order.
        nbytes: Bytes of the data of all of them.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.leaves = tuple(TensorLeaf(*leaf[1:]) for leaf in _tensor_leaves(tree))
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        #: Whether it is a tuple of one tensor, as what goes back over an edge mostly is.
        self._is_pack = tree[0] == "tuple" and len(tree) == 2 and tree[1][0] == "tensor"

    def rebuild(self, tensors: list[Any]) -> Any:
        """Returns the value with ``tensors`` as its tensors."""
        if self.tree[0] == "tensor":
            return tensors[0]
        if self._is_pack:
            return (tensors[0],)
        return _rebuild(self.tree, iter(tensors))


def encode(name: str, structure: Structure, route: Route) -> bytes:
    """Returns the announcement of a channel's structure: JSON in ASCII.

    Args:
        name: The name of the channel's edge.
        structure: The structure its values have from now on.
        route: The message, for the text of an error.

    Raises:
        BoundaryError: The structure or its tensors are larger than a message may be.
    """
    text = json.dumps([name, structure.tree], separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_ANNOUNCEMENT or structure.nbytes > LARGEST_PAYLOAD:
        raise BoundaryError(
            "a value is too large to cross to another stage",
            where=str(route),
            expected=f"at most {LARGEST_PAYLOAD} bytes of tensors and {LARGEST_ANNOUNCEMENT} "
            "bytes of everything else",
            got=f"{structure.nbytes} and {len(text)} bytes",
            fix="put long texts and long lists of numbers into tensors; cut large tensors",
        )
    return text


def decode(text: bytes) -> tuple[str, Structure]:
    """Reads an announcement of :func:`encode`.

    Raises:
        TransportError: The bytes are not an announcement, or the structure is too large.
    """
    try:
        name, tree = parse_small(text, _DEEPEST_LIST, _MOST_LISTS, _MOST_STRINGS)
        if type(name) is not str:
            raise ValueError("the name is no text")
        structure = Structure(_to_tree(tree, DEEPEST))
        if structure.nbytes > min(LARGEST_PAYLOAD, _MEMORY_BYTES):
            raise ValueError(
                f"{structure.nbytes} bytes of tensors, where this host has {_MEMORY_BYTES}"
            )
    except (ValueError, TypeError, LookupError) as error:
        raise TransportError(
            "an announcement is damaged",
            expected="the name of a channel and the structure of its values, in JSON",
            got=f"{text[:200]!r} ({str(error)[:200]})",
            fix="install the same version of fleetpipe on every host",
        ) from None
    return name, structure


def _tensor_leaves(tree: Tree) -> Iterator[Tree]:
    kind = tree[0]
    if kind == "tensor":
        yield tree
    elif kind == "dict":
        for _, child in tree[1:]:
            yield from _tensor_leaves(child)
    elif kind in ("tuple", "list"):
        for child in tree[1:]:
            yield from _tensor_leaves(child)


def _rebuild(tree: Tree, tensors: Iterator[Any]) -> Any:
    kind = tree[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {key: _rebuild(child, tensors) for key, child in tree[1:]}
    if kind == "list":
        return [_rebuild(child, tensors) for child in tree[1:]]
    if kind == "tuple":
        return tuple(_rebuild(child, tensors) for child in tree[1:])
    return None if kind == "none" else _SCALARS[kind](tree[1])


def _to_tree(node: Any, depth: int) -> Tree:
    """Turns the lists of JSON into tuples and refuses a tree that no sender creates."""
    kind, rest = node[0], node[1:]
    if kind == "tensor":
        dtype, shape, stop_gradient = rest
        fits = len(shape) <= MOST_DIMENSIONS
        if not fits or not all(type(n) is int and 0 <= n <= _LARGEST_SIZE for n in shape):
            raise ValueError(f"a shape that no tensor has, {str(shape[:MOST_DIMENSIONS])[:200]}")
        return (kind, _known_dtype(dtype), tuple(shape), bool(stop_gradient))
    if kind == "none" and not rest:
        return ("none",)
    if kind in _SCALARS:
        (content,) = rest
        if type(content) is not (bool if kind == "bool" else str):
            raise ValueError(f"{kind} of another type")
        if kind == "float" and len(str(content)) > _LONGEST_FLOAT:
            raise ValueError("a float of too many characters")
        _SCALARS[kind](content)
        return (kind, content)
    if not depth or kind not in ("tuple", "list", "dict"):
        raise ValueError(f"unknown or too deep: {str(kind)[:40]!r}")
    if kind == "dict":
        return (kind, *(_entry(key, child, depth) for key, child in rest))
    return (kind, *(_to_tree(child, depth - 1) for child in rest))


def _entry(key: Any, child: Any, depth: int) -> tuple[str, Tree]:
    if type(key) is not str:
        raise ValueError("a key that is no text")
    return key, _to_tree(child, depth - 1)


def _known_dtype(dtype: str) -> str:
    if dtype not in SIZES:
        raise ValueError(f"dtype {str(dtype)[:40]!r}")
    return dtype


# The structure of None, and a place to begin where none is known yet.
NOTHING = Structure(("none",))
