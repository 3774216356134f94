"""Reads the pickles that ``paddle.save`` writes without running what a file names.

A pickle is a program for a small stack machine, in which any function of any module may be called.
This machine knows only the operations of Paddle's files, and calls only the functions of
:data:`_CALLS`, which build arrays and plain containers. Memory is taken for bytes that are there.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

#: What a pickle builds: plain containers, numbers and texts, arrays, and what is not finished yet.
Pickled = Any

_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_DTYPES = {f"{kind}{size}" for kind, sizes in _SIZES.items() for size in sizes}
#: Operations that push their own argument, and those that push a constant or an empty container.
_ARGUMENTS = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
}
_CONSTANTS: Mapping[str, bool | None] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Mapping[str, Callable[[], Pickled]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_DEEPEST = 100
_PLAIN = (bool, int, float, str, bytes, np.ndarray, np.generic)


class Refused(ValueError):
    """A pickle holds what ``paddle.save`` does not write; the message says what."""


class _Name(NamedTuple):
    """A function or class that the pickle names."""

    full: str


class _Unbuilt:
    """An array or a dtype whose state follows.

    Attributes:
        build: Makes it from its state.
        memo: Where the machine remembers it.
    """

    def __init__(self, build: Callable[[Pickled], Pickled]) -> None:
        self.build = build
        self.memo: list[int] = []


def read(file: BinaryIO) -> Pickled:
    """Returns what a file of ``paddle.save`` holds.

    Args:
        file: Open for reading, at its begin.

    Returns:
        Dicts, lists, tuples, numbers, strings, and arrays in the place of tensors, which may share
        the file's bytes and not be writable; bfloat16 is its bits as uint16.

    Raises:
        Refused: It holds something else.
        ValueError: It is no pickle, or ends early.
    """
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(file):
        try:
            machine.run(operation.name, argument)
        except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise Refused(f"{operation.name} of what it is not for: {error}") from error
    if file.read(1):
        raise Refused("more bytes after its end")
    if len(machine.stack) != 1:
        raise Refused("no single value at its end")
    (value,) = machine.stack
    _require_plain(value)
    return value


_TOLD = {list: "a list", dict: "a dict", _Unbuilt: "an array"}


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self) -> None:
        self.stack: list[Pickled] = []
        self._marks: list[int] = []
        self._memo: dict[int, Pickled] = {}

    def run(self, operation: str, argument: Pickled) -> None:
        """Runs one operation."""
        if operation in _ARGUMENTS:
            self.stack.append(argument)
        elif operation in _CONSTANTS:
            self.stack.append(_CONSTANTS[operation])
        elif operation in _EMPTY:
            self.stack.append(_EMPTY[operation]())
        elif operation in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[operation])))
        elif operation in _OPERATIONS:
            _OPERATIONS[operation](self, argument)
        else:
            raise Refused(f"the pickle operation {operation}")

    def _pop(self, count: int) -> list[Pickled]:
        if len(self.stack) < count:
            raise Refused("an operation without its operands")
        start = len(self.stack) - count
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _pop_to_mark(self) -> list[Pickled]:
        if not self._marks or self._marks[-1] > len(self.stack):
            raise Refused("an operation without its mark")
        return self._pop(len(self.stack) - self._marks.pop())

    def _top(self, kind: type) -> Pickled:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise Refused(f"an operation on something else than {_TOLD[kind]}")
        return self.stack[-1]

    def _mark(self, _: None) -> None:
        self._marks.append(len(self.stack))

    def _tuple(self, _: None) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def _append(self, _: None) -> None:
        (item,) = self._pop(1)
        self._top(list).append(item)

    def _appends(self, _: None) -> None:
        items = self._pop_to_mark()
        self._top(list).extend(items)

    def _set(self, _: None) -> None:
        items = self._pop(2)
        self._put_into_dict(items)

    def _sets(self, _: None) -> None:
        self._put_into_dict(self._pop_to_mark())

    def _put_into_dict(self, items: list[Pickled]) -> None:
        target, keys = self._top(dict), items[::2]
        if len(items) % 2 or any(type(key) not in (str, int) for key in keys):
            raise Refused("a dict whose keys are neither names nor numbers")
        target.update(zip(keys, items[1::2]))

    def _remember(self, key: int | None) -> None:
        (value,) = self._pop(1)
        self.stack.append(value)
        key = len(self._memo) if key is None else key
        self._memo[key] = value
        if isinstance(value, _Unbuilt):
            value.memo.append(key)

    def _recall(self, key: int) -> None:
        if key not in self._memo:
            raise Refused("an operation that recalls what was not there")
        self.stack.append(self._memo[key])

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _: None) -> None:
        self._name(*self._pop(2))

    def _name(self, *parts: Pickled) -> None:
        full = ".".join(map(str, parts))
        if full != _ARRAY and full not in _CALLS:
            raise Refused(f"the name {full[:80]!r}")
        self.stack.append(_Name(full))

    def _reduce(self, _: None) -> None:
        name, arguments = self._pop(2)
        if not isinstance(name, _Name) or name.full not in _CALLS or type(arguments) is not tuple:
            raise Refused("a call of something that is no function")
        self.stack.append(_CALLS[name.full](*arguments))

    def _build(self, _: None) -> None:
        (state,) = self._pop(1)
        unbuilt = self._top(_Unbuilt)
        built = self.stack[-1] = unbuilt.build(state)
        for key in unbuilt.memo:
            self._memo[key] = built

    def _pass(self, _: object) -> None:
        """PROTO and FRAME tell a reader what it need not know; STOP ends the loop by itself."""


_OPERATIONS: Mapping[str, Callable[[_Machine, Pickled], None]] = {
    "PROTO": _Machine._pass,
    "FRAME": _Machine._pass,
    "STOP": _Machine._pass,
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set,
    "SETITEMS": _Machine._sets,
    "MEMOIZE": _Machine._remember,
    "BINPUT": _Machine._remember,
    "LONG_BINPUT": _Machine._remember,
    "BINGET": _Machine._recall,
    "LONG_BINGET": _Machine._recall,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "BUILD": _Machine._build,
}


def _dtype(code: Pickled, *_: object) -> _Unbuilt:
    if code not in _DTYPES:
        raise Refused(f"an array of dtype {str(code)[:40]!r}")
    return _Unbuilt(lambda state: np.dtype(code).newbyteorder(state[1]))


def _array(*_: object) -> _Unbuilt:
    return _Unbuilt(_array_of)


def _array_of(state: Pickled) -> np.ndarray:
    """Makes an array of ``(version, shape, dtype, whether in Fortran's order, bytes)``."""
    _, shape, dtype, in_fortrans_order, data = state
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes):
        raise Refused("an array that is not of numbers")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise Refused("an array without a shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise Refused(f"{len(data)} bytes for an array of {dtype} of shape {[*shape]}"[:200])
    array: np.ndarray = np.ndarray(shape, dtype, data, order="F" if in_fortrans_order else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _scalar(dtype: Pickled, data: Pickled) -> Pickled:
    return _array_of((1, (), dtype, False, data))[()]


def _empty_dict() -> dict[str, Pickled]:
    return {}


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise Refused("a text in another encoding than latin1")
    return text.encode("latin1")


def _named_tensor(pair: Pickled) -> np.ndarray:
    """Returns the array of a tensor that was saved with its name."""
    name, array = pair
    if not isinstance(name, str) or not isinstance(array, np.ndarray):
        raise Refused("a tuple that is no tensor")
    return array


def _static_tensor(expression: Pickled, names: Pickled) -> np.ndarray:
    """Does what Paddle asks ``eval`` for: it gives back what it was given."""
    if expression != "data" or not isinstance(names["data"], np.ndarray):
        raise Refused("an expression to evaluate")
    array: np.ndarray = names["data"]
    return array


_ARRAY = "numpy.ndarray"
#: What Paddle's files call. numpy 2 has another name for its module, and protocol 2 for Python's.
_CALLS: Mapping[str, Callable[..., Pickled]] = {
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "_codecs.encode": _bytes,
    "__builtin__.bytes": _bytes,
    "__builtin__.tuple": _named_tensor,
    "builtins.tuple": _named_tensor,
    "__builtin__.eval": _static_tensor,
    "builtins.eval": _static_tensor,
    "collections.OrderedDict": _empty_dict,
}


def _require_plain(value: Pickled) -> None:
    """Refuses what was left unfinished, and containers that hold themselves or nest endlessly."""
    seen: set[int] = set()
    open_containers: set[int] = set()
    todo: list[tuple[Pickled, bool]] = [(value, False)]
    while todo:
        value, left = todo.pop()
        if type(value) not in (dict, list, tuple):
            if value is not None and not isinstance(value, _PLAIN):
                raise Refused("a name or an array that was not finished")
        elif left:
            open_containers.discard(id(value))
        elif id(value) in open_containers or len(open_containers) > _DEEPEST:
            raise Refused("a container that holds itself, or very many in each other")
        elif id(value) not in seen:
            seen.add(id(value))
            open_containers.add(id(value))
            todo.append((value, True))
            items = value.values() if type(value) is dict else value
            todo.extend((item, False) for item in items)
