"""Saves and loads files of parameters and optimizer states as ``paddle.save`` writes them.

A file is replaced only by a complete one. Paddle's ``.pdparams`` and ``.pdopt`` are pickles, from
which ``pickled.py`` reads only values, so that a file cannot run code. A file that cannot be read
raises a ``CheckpointError`` that says what it seems to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.atomic_file import replacing
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files import pickled
from fleetpipe.paddle_api import paddle

Contents = TypeVar("Contents")

#: Typed as Any, since the stub accepts tensors only.
_write: Any = paddle.save
#: Keys that Paddle adds to a dict of tensors: their names, and how it divided the largest ones.
_COUNTED_NAMES, _DIVIDED = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
#: The first bytes of files of other kinds, and what these are.
_FILE_BEGINNINGS = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"PK\x03\x04", "a zip archive, as .npz and the files of PyTorch are"),
    (b"version https://git-lfs", "a pointer of Git LFS: `git lfs pull` brings the file itself"),
    (b"\x93NUMPY", "a single array of numpy (.npy)"),
    (b"\x80", "a pickle; paddle.load would run what it names"),
)


def save(path: str | os.PathLike[str], contents: Nest, protocol: int = 4) -> None:
    """Writes a file as ``paddle.save`` does; an older file stays until the new one is complete.

    Args:
        path: The file.
        contents: A dict of tensors or arrays.
        protocol: The pickle protocol, 2 to 4.

    Raises:
        OSError: The file cannot be written; the older one stays.
    """
    target = Path(path)
    save_all(target.parent, {target.name: contents}, protocol)


def save_all(folder: str | os.PathLike[str], files: Mapping[str, Nest], protocol: int = 4) -> None:
    """Saves several files into a folder as :func:`save` does; makes a folder that is missing.

    Args:
        folder: The folder.
        files: The contents of each file, a dict of tensors or arrays, by the file's name.
        protocol: The pickle protocol, 2 to 4.

    Raises:
        OSError: A file cannot be written; all older ones stay.
    """
    with replacing(Path(folder)) as draft:
        for name, contents in files.items():
            _write(contents, str(draft / name), protocol=protocol)


def load(path: str | os.PathLike[str]) -> dict[str, Nest]:
    """Reads a file of ``paddle.save`` as ``paddle.load`` does, without running its functions.

    Args:
        path: A ``.pdparams`` or ``.pdopt`` file of Fleet's, of Paddle's or of fleetpipe's.

    Returns:
        The saved values, with tensors on the current device.

    Raises:
        CheckpointError: The file is missing, unreadable, or holds something else.
    """
    contents: dict[str, Nest] = _with_tensors(arrays(path), {})
    return contents


def arrays(path: str | os.PathLike[str]) -> dict[str, Nest]:
    """Reads a file as :func:`load` does, with arrays in place of tensors; bfloat16 as uint16.

    Raises:
        CheckpointError: As for :func:`load`.
    """
    return _read_guarded(path, _pickled_dict)[0]


def counted_names(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Returns the pairs (name in the state dict, name that Paddle counted) of a file's tensors.

    ``linear_0.w_0`` is a counted name; an optimizer's file uses those.

    Raises:
        CheckpointError: As for :func:`load`.
    """
    return [*_read_guarded(path, _pickled_dict)[1].items()]


def mapped(path: str | os.PathLike[str]) -> dict[str, Nest]:
    """Reads a file as :func:`arrays` does, but large arrays are memory-mapped.

    Their values are read when they are used.

    Raises:
        CheckpointError: As for :func:`load`.
    """
    contents = _read_guarded(path, lambda file: _pickled_dict(file, leave_arrays=True))[0]
    memory = np.memmap(path, np.uint8, "r")
    return {
        name: np.ndarray(value.shape, value.dtype, memory, value.begin, order=value.order)
        if isinstance(value, pickled.ArrayLocation)
        else value
        for name, value in contents.items()
    }


def record(path: str | os.PathLike[str], kinds: Collection[str]) -> pickled.PickledObject:
    """Reads a single object that ``paddle.save`` wrote, without importing its class.

    Args:
        path: The file.
        kinds: Full names of the classes of which the file may contain objects.

    Returns:
        The name of the class and the attributes of the object.

    Raises:
        CheckpointError: As for :func:`load`.
    """

    def read_record(file: BinaryIO) -> pickled.PickledObject:
        """Returns the object in an open file; raises ``Refused`` for anything else."""
        contents = pickled.read(file, kinds)
        if not isinstance(contents, pickled.PickledObject):
            raise pickled.Refused(f"a {type(contents).__name__}, not an object")
        return contents

    return _read_guarded(path, read_record)


def _read_guarded(path: str | os.PathLike[str], read: Callable[[BinaryIO], Contents]) -> Contents:
    """Opens a file, and returns the result of ``read`` on it.

    Raises:
        CheckpointError: The file is missing or unreadable, or ``read`` failed.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise CheckpointError(f"there is no {name}", fix="check the path, and which ranks saved")
    if not os.path.isfile(name):
        raise CheckpointError(f"{name} is no file", fix="pass a file that paddle.save wrote")
    try:
        with open(name, "rb") as file:
            return read(file)
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read", cause=str(error), fix="make it readable for this process"
        ) from error
    # A damaged file can cause any error in the reader.
    except Exception as error:
        raise CheckpointError(
            f"{name} is not what paddle.save writes; nothing of it was run or loaded",
            expected="a dict of tensors that paddle.save wrote",
            got=f"it holds {error}" if isinstance(error, pickled.Refused) else str(error)[:200],
            cause=_describe_begin(name),
            fix="save it again with paddle.save, if it is yours",
        ) from error


def _describe_begin(name: str) -> str:
    """Returns a text for an error: the size of a file, and its kind by its first bytes."""
    with open(name, "rb") as file:
        begin = file.read(64)
    size = os.path.getsize(name)
    if not begin:
        return "it is empty: the disk was full, or the one who wrote it was stopped"
    for first_bytes, kind in _FILE_BEGINNINGS:
        if begin.startswith(first_bytes):
            return f"it has {size} bytes and begins as {kind}"
    return f"it has {size} bytes and begins with {begin[:24]!r}"


def _pickled_dict(
    file: BinaryIO, *, leave_arrays: bool = False
) -> tuple[dict[str, Nest], dict[str, str]]:
    """Reads the dict in a file of ``paddle.save``.

    Args:
        file: The file, open for reading.
        leave_arrays: Whether large arrays stay in the file, and their location stands for each.

    Returns:
        The values by name, and for tensors of parameters the name that Paddle counted.

    Raises:
        ValueError: The file has something else than a dict.
    """
    contents = pickled.read(file, leave_arrays=leave_arrays)
    if not isinstance(contents, dict):
        raise pickled.Refused(f"a {type(contents).__name__}, not a dict")
    names = contents.pop(_COUNTED_NAMES, {})
    for name, description in contents.pop(_DIVIDED, {}).items():
        parts = [contents.pop(part_name) for part_name in description["slices"]]
        contents[name] = np.concatenate(parts).reshape(description["OriginShape"])
    return contents, names


def _with_tensors(value: Nest, converted: dict[int, Nest]) -> Nest:
    """Returns a nested value with tensors for its arrays; a repeated item is converted once.

    ``converted`` has the results so far, by the ``id()`` of the items.
    """
    if id(value) not in converted:
        if isinstance(value, np.ndarray):
            converted[id(value)] = paddle.to_tensor(value)
        elif isinstance(value, dict):
            items = {key: _with_tensors(item, converted) for key, item in value.items()}
            converted[id(value)] = items
        elif isinstance(value, (list, tuple)):
            converted[id(value)] = type(value)(_with_tensors(item, converted) for item in value)
        else:
            return value
    return converted[id(value)]
