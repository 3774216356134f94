"""Reads the pickles that ``paddle.save`` writes, without running the functions that a file names.

A pickle is a program for a small stack machine, which may call any function of any module. Here
Python's own machine runs only the operations that Paddle's files have, and calls only the functions
of :data:`_CALLS`, which build arrays and plain containers. It allocates no more memory than the
file has bytes. Python's machine written in C is not used: it allocates memory for as many values as
a file announces, and overflows the stack when it hashes a deeply nested key. An array comes in two
operations, the second of which has its shape and bytes: until then it is unbuilt.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import struct
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from fleetpipe.errors import is_shape

#: A value in a pickle: plain containers, numbers, texts, arrays, and arrays not yet built.
Pickled = Any

#: The bytes of an element of each kind of NumPy's dtypes that Paddle's files have.
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
#: Their names, such as "f4", a float of four bytes.
_DTYPES = {f"{kind}{size}" for kind, sizes in _SIZES.items() for size in sizes}
#: The names of the operations that Paddle's files have; see ``pickletools``.
_OPERATIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "REDUCE", "BUILD", "GLOBAL", "STACK_GLOBAL", "NEWOBJ"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
#: The most containers around a value.
_MOST_NESTED = 100
#: The errors that an operation raises if its operands have other types than in Paddle's files.
_OPERATION_ERRORS = (
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    pickle.UnpicklingError,
)
#: The types of values that are no containers, and need no change when a file has been read.
_PLAIN = (bool, int, float, str, bytes, np.generic)

_Python: Any = pickle._Unpickler


class Refused(ValueError):
    """A pickle has something that ``paddle.save`` does not write; the message says what."""


class ArrayLocation(NamedTuple):
    """The location of an array that was left in its file.

    Attributes:
        dtype: The dtype of the elements in the file.
        shape: The shape of the array.
        order: ``"C"`` or ``"F"``, the order of the elements in the file.
        begin: The offset of the first element in the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    begin: int


def read(file: BinaryIO, records: Collection[str] = (), *, leave_arrays: bool = False) -> Pickled:
    """Returns the contents of a file of ``paddle.save``.

    Args:
        file: The file, open for reading, at its begin.
        records: Full names of classes of which the file may have objects; each is read as a
            :class:`PickledObject`.
        leave_arrays: Whether large arrays stay in the file: an :class:`ArrayLocation` stands for
            each.

    Returns:
        Dicts, lists, tuples, numbers, strings, and arrays in place of tensors. An array may share
        the file's bytes and be read-only; bfloat16 is read as uint16 with its bits.

    Raises:
        Refused: The file has something that ``paddle.save`` does not write.
        ValueError: The file is no pickle, or ends early.
    """
    machine = _Machine(_Bytes(file), records, leave_arrays)
    try:
        value = machine.load()
    except _OPERATION_ERRORS as error:
        raise Refused(f"an operation on what it is not for: {error}") from error
    if file.read(1):
        raise Refused("more bytes after its end")
    if machine.stack or machine.metastack:
        raise Refused("no single value at its end")
    built, _ = _build_values(value, {}, 0)
    return built


class _Bytes:
    """A file that refuses to read more bytes than it has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        """Returns the next bytes; raises a ValueError if the file has fewer."""
        data = self._file.read(min(count, self._size))
        if len(data) < count:
            raise ValueError(f"{count} bytes are announced, and {len(data)} left")
        return data

    def skip(self, count: int) -> _BytesLocation:
        """Skips bytes, and returns their location; raises a ValueError if they do not exist."""
        begin = self._file.tell()
        if begin + count > self._size:
            raise ValueError(f"{count} bytes are announced, and {self._size - begin} left")
        self._file.seek(count, os.SEEK_CUR)
        return _BytesLocation(begin, nbytes=count)


class _BytesLocation(NamedTuple):
    """The location of bytes in a file that were not read.

    Attributes:
        begin: The offset of the first byte.
        nbytes: The number of bytes.
    """

    begin: int
    nbytes: int


class _Unbuilt:
    """An array or a dtype whose state comes later in the pickle.

    Attributes:
        value: The array or dtype; None until :meth:`build` was called.
    """

    def __init__(self, build: Callable[[Pickled], Pickled]) -> None:
        """Takes the function that returns the array or dtype, given its state in the pickle."""
        self._build = build
        self.value: Pickled = None

    def build(self, state: Pickled) -> None:
        """Builds the value from its state in the pickle."""
        self.value = self._build(state)


class _ClassName(str):
    """The name of a class in a pickle, which stands for the class."""


class PickledObject(_Unbuilt):
    """An object in a pickle, whose class is not imported.

    Attributes:
        kind: The name of the object's class, without the module.
        fields: The object's attributes by name.
    """

    def __init__(self, kind: str) -> None:
        """Begins an object of the class ``kind``, whose state comes later in the pickle."""
        super().__init__(self._take)
        self.kind = kind
        self.fields: dict[str, Pickled] = {}

    def _take(self, state: Pickled) -> Pickled:
        """Stores the object's state as its attributes; returns None, as there is no other value."""
        if type(state) is not dict:
            raise Refused("an object with a state that is no dict")
        self.fields = state


class _Operations(dict[int, Callable[[Any], None]]):
    """The methods of the allowed operations by their codes; any other code raises ``Refused``."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        """Raises the error that names the operation of a code which is not allowed."""
        names = {ord(operation.code): operation.name for operation in pickletools.opcodes}
        raise Refused(f"the pickle operation {names.get(code, code)}")


class _Machine(_Python):  # type: ignore[misc]
    """Python's unpickler, restricted to the operations of Paddle's files.

    The methods ``load_*`` replace Python's: each runs one operation of a pickle. They pop their
    operands from ``self.stack``; ``self.append`` pushes a value, ``self.read`` reads bytes.
    """

    def __init__(self, file: _Bytes, records: Collection[str], leave_arrays: bool) -> None:
        """Takes the file to read.

        Args:
            file: The file.
            records: Full names of the classes of which the pickle may have objects.
            leave_arrays: Whether the bytes of large arrays are skipped: then the value in their
                place is their location in the file.
        """
        super().__init__(file)
        self._records = records
        self._read_or_skip = file.skip if leave_arrays else file.read

    def find_class(self, module: str, name: str) -> Callable[..., Pickled] | _ClassName:
        """Returns what a name of a module stands for: a function of ``_CALLS``, or a class's name.

        Raises:
            Refused: The name is neither in ``_CALLS`` nor one of the classes of records.
        """
        full_name = f"{module}.{name}"
        if full_name in self._records:
            return _ClassName(name)
        if full_name not in _CALLS:
            raise Refused(f"the name {full_name[:80]!r}")
        return _CALLS[full_name]

    def load_frame(self) -> None:
        """Skips the length of a frame, which is a hint for buffered readers."""
        self.read(8)

    def load_reduce(self) -> None:
        """Calls the function on the stack, if it is an allowed one, and pushes its result."""
        arguments, call = self.stack.pop(), self.stack.pop()
        if not isinstance(call, FunctionType) or type(arguments) is not tuple:
            raise Refused("a call of something that is no function")
        self.append(call(*arguments))

    def load_newobj(self) -> None:
        """Begins an object of the class on the stack, if that is an allowed one."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, _ClassName) or arguments != ():
            raise Refused("an object of something else than a class of records")
        self.append(PickledObject(kind))

    def load_binbytes(self) -> None:
        """Reads bytes after a length of four bytes, or leaves them in the file."""
        (count,) = struct.unpack("<I", self.read(4))
        self.append(self._read_or_skip(count))

    def load_binbytes8(self) -> None:
        """Reads bytes after a length of eight bytes, or leaves them in the file."""
        (count,) = struct.unpack("<Q", self.read(8))
        self.append(self._read_or_skip(count))

    def load_build(self) -> None:
        """Builds the array, dtype or object on the stack from the state on top of it."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Unbuilt):
            raise Refused("a state of something else than an array")
        self.stack[-1].build(state)

    def load_setitem(self) -> None:
        """Adds an item to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._add_items([key, value])

    def load_setitems(self) -> None:
        """Adds several items to a dict."""
        self._add_items(self.pop_mark())

    def _add_items(self, items: list[Pickled]) -> None:
        """Adds ``[key, value, key, value, ..]`` to the dict on top of the stack."""
        keys = items[::2]
        allowed = (type(key) in (str, int) or isinstance(key, PickledObject) for key in keys)
        if len(items) % 2 or not all(allowed):
            raise Refused("a dict whose keys are neither names nor numbers")
        if type(self.stack[-1]) is not dict:
            raise Refused("an item of something else than a dict")
        self.stack[-1].update(zip(keys, items[1::2]))


_Machine.dispatch = _Operations(
    {
        ord(operation.code): getattr(_Machine, _Python.dispatch[ord(operation.code)].__name__)
        for operation in pickletools.opcodes
        if operation.name in _OPERATIONS
    }
)


def _unbuilt_dtype(code: Pickled, *_: object) -> _Unbuilt:
    """Replaces ``numpy.dtype`` in a pickle: begins a dtype, whose byte order comes later."""
    if type(code) is not str or code not in _DTYPES:
        raise Refused(f"an array of dtype {str(code)[:40]!r}")
    return _Unbuilt(lambda state: np.dtype(code).newbyteorder(state[1]))


def _unbuilt_array(*_: object) -> _Unbuilt:
    """Replaces NumPy's ``_reconstruct`` in a pickle: begins an array, whose contents come later."""
    return _Unbuilt(_build_array)


def _build_array(state: Pickled) -> np.ndarray | ArrayLocation:
    """Builds an array from its state ``(version, shape, dtype, is in Fortran's order, bytes)``.

    If the bytes were left in the file, it returns their location as an array.
    """
    _, shape, unbuilt, in_fortrans_order, data = state
    dtype = unbuilt.value
    if not isinstance(dtype, np.dtype) or not isinstance(data, (bytes, _BytesLocation)):
        raise Refused("an array that is not of numbers")
    if not is_shape(shape):
        raise Refused("an array without a shape")
    nbytes = data.nbytes if isinstance(data, _BytesLocation) else len(data)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise Refused(f"{nbytes} bytes for an array of {dtype} of shape {[*shape]}"[:200])
    order: Literal["C", "F"] = "F" if in_fortrans_order else "C"
    if isinstance(data, _BytesLocation):
        return ArrayLocation(dtype, tuple(shape), order, data.begin)
    array: np.ndarray = np.ndarray(shape, dtype, data, order=order)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _build_scalar(dtype: Pickled, data: Pickled) -> Pickled:
    """Replaces NumPy's ``scalar``: returns a number from its unbuilt dtype and its bytes."""
    array: Any = _build_array((1, (), dtype, False, data))
    return array[()]


def _encoded_bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Replaces ``_codecs.encode``, which protocol 2 calls for bytes: encodes a text in Latin-1."""
    if encoding != "latin1":
        raise Refused("a text in another encoding than latin1")
    return text.encode("latin1")


def _named_tensor(pair: Pickled) -> _Unbuilt:
    """Replaces ``tuple``, which Paddle's pickles call on a name and an array; returns the array."""
    name, array = pair
    if not isinstance(name, str) or not isinstance(array, _Unbuilt):
        raise Refused("a tuple that is no tensor")
    return array


def _static_tensor(expression: Pickled, names: Pickled) -> _Unbuilt:
    """Replaces ``eval``: returns the array of the only call of it that Paddle's pickles have.

    The call is ``eval("data", {"data": array})``; any other expression is refused.
    """
    if expression != "data" or not isinstance(names["data"], _Unbuilt):
        raise Refused("an expression to evaluate")
    array: _Unbuilt = names["data"]
    return array


def _refuse_array_type(*_: object) -> Pickled:
    """Stands for ``numpy.ndarray``, which a pickle of an array names, and refuses to be called."""
    raise Refused("a call of the type of arrays")


#: The functions that Paddle's files call, by name. numpy 2 has other modules, and protocol 2 has
#: Python 2's name of builtins.
_CALLS: Mapping[str, Callable[..., Pickled]] = {
    "numpy.ndarray": _refuse_array_type,
    "numpy.dtype": _unbuilt_dtype,
    "numpy.core.multiarray._reconstruct": _unbuilt_array,
    "numpy._core.multiarray._reconstruct": _unbuilt_array,
    "numpy.core.multiarray.scalar": _build_scalar,
    "numpy._core.multiarray.scalar": _build_scalar,
    "_codecs.encode": _encoded_bytes,
    "__builtin__.bytes": _encoded_bytes,
    "__builtin__.tuple": _named_tensor,
    "builtins.tuple": _named_tensor,
    "__builtin__.eval": _static_tensor,
    "builtins.eval": _static_tensor,
    "collections.OrderedDict": lambda: {},  # noqa: PIE807 - no class may be called
}


def _build_values(
    value: Pickled, results: dict[int, tuple[Pickled, int]], depth: int
) -> tuple[Pickled, int]:
    """Replaces each :class:`_Unbuilt` in a value by the array that it has built.

    Args:
        value: A value that the unpickler has built; an item that is in it twice is converted once.
        results: What this function has returned for each container so far, by its ``id()``.
        depth: The number of containers around the value.

    Returns:
        The new value, and its height: 0 for a value that is no container, else one more than that
        of the highest item.

    Raises:
        Refused: The value has something unfinished, or is nested too deeply.
    """
    if isinstance(value, _Unbuilt) and isinstance(value.value, (np.ndarray, ArrayLocation)):
        return value.value, 0
    if value is None or isinstance(value, _PLAIN):
        return value, 0
    if type(value) not in (dict, list, tuple, PickledObject):
        raise Refused("a name or an array that was not finished")
    if id(value) not in results and depth < _MOST_NESTED:
        # Stands until the items are done, for a container that holds itself: the limit refuses it.
        results[id(value)] = (None, _MOST_NESTED)
        if type(value) is PickledObject:
            value.fields, height = _build_values(value.fields, results, depth + 1)
            results[id(value)] = (value, 1 + height)
            return results[id(value)]
        items = value.values() if type(value) is dict else value
        pairs = [_build_values(item, results, depth + 1) for item in items]
        new_items = [item for item, _ in pairs]
        built = dict(zip(value, new_items)) if type(value) is dict else type(value)(new_items)
        results[id(value)] = (built, 1 + max((height for _, height in pairs), default=0))
    _, height = results.get(id(value), (None, 1))
    if depth + height > _MOST_NESTED:
        raise Refused("a container that holds itself, or very many in each other")
    return results[id(value)]
