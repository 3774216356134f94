"""Splits a value that crosses between stages into structure and tensors, if it can cross."""

from __future__ import annotations

from typing import Any

from fleetpipe.errors import BoundaryError
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Tensor
from fleetpipe.transport.wire.message import Route
from fleetpipe.transport.wire.structure import DEEPEST, MOST_PARTS, Tree

ALLOWED = (
    "a dense Tensor of any dtype, None, bool, int, float, str, or a tuple, list or dict with "
    "str keys of these"
)

_Path = tuple[object, ...]


class Unfit(Exception):
    """A part of a value cannot cross; becomes a BoundaryError once the message is known."""

    def __init__(self, path: _Path, got: str) -> None:
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
        return _tensor(value, ()), [value]
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Tensor):
        # What goes back over an edge of one tensor: the walk would take as long as the rest.
        return ("tuple", _tensor(value[0], (0,))), [value[0]]
    walk = _Walk()
    return walk.tree(value, (), DEEPEST), walk.tensors


class _Walk:
    """One pass over a value."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._parts = 0

    def tree(self, value: Any, path: _Path, depth: int) -> Tree:
        """Returns the structure of one part of the value; types must match exactly."""
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _tensor(value, path)
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
            self._enter(len(value), path, depth)
            return (
                kind.__name__,
                *[self.tree(part, (*path, i), depth - 1) for i, part in enumerate(value)],
            )
        if kind is dict:
            self._enter(len(value), path, depth)
            return ("dict", *[self._entry(item, path, depth) for item in value.items()])
        raise Unfit(path, f"an object of type {_type_name(kind)}")

    def _entry(self, item: tuple[Any, Any], path: _Path, depth: int) -> Tree:
        key, part = item
        if type(key) is not str:
            raise Unfit(path, f"a dict with the key {key!r:.60} of type {_type_name(type(key))}")
        return (key, self.tree(part, (*path, key), depth - 1))

    def _enter(self, parts: int, path: _Path, depth: int) -> None:
        self._parts += parts
        if not depth:
            raise Unfit(path[:3], f"parts nested more than {DEEPEST} deep (within themselves?)")
        if self._parts > MOST_PARTS:
            raise Unfit((), f"more than {MOST_PARTS} parts")


def _tensor(tensor: Tensor, path: _Path) -> Tree:
    shape = tuple(tensor.shape)
    dtype = bridge.NAMES.get(tensor.dtype)
    if not tensor.is_dense():
        raise Unfit(path, "a Tensor that is not dense: SelectedRows, sparse, distributed or freed")
    if dtype is None:
        raise Unfit(path, f"a Tensor of dtype {tensor.dtype}")
    if not tensor.data_ptr() and 0 not in shape:
        raise Unfit(path, f"a Tensor of shape {list(shape)} without data: it was freed")
    return ("tensor", dtype, shape, tensor.stop_gradient)


def _type_name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__
