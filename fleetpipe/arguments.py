"""Parsers of command line arguments: numbers and files, with errors that say what to give.

``argparse`` calls a function such as :func:`positive` as the ``type`` of an argument; it raises
``ArgumentTypeError`` for a text that it cannot read.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from fleetpipe.errors import ConfigError
from fleetpipe.extras import INSTALLED_BY, missing_packages

#: The largest number of processes that a command starts on one machine.
MOST_PROCESSES = 1024


def spellings(name: str) -> list[str]:
    """Returns the spellings of an option: with ``-``, and with ``_`` as Paddle's launcher has it.

    Args:
        name: The option's name without dashes in front, such as ``log_dir``.
    """
    return [*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}"))]


def number(text: str) -> float:
    """Returns the number that a text says: an ``int`` if it has no fraction, else a ``float``."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid number: {text!r}") from None


def processes(text: str) -> int:
    """Returns a number of processes to launch, from 1 to 1024."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PROCESSES:
        raise argparse.ArgumentTypeError(
            f"invalid number of processes: {text!r}; give 1 to {MOST_PROCESSES}"
        )
    return int(text)


def positive(text: str) -> int:
    """Returns a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"invalid number: {text!r}; give 1, 2, 3, ..")
    return int(text)


def count(text: str) -> int:
    """Returns a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid count: {text!r}; give 0, 1, 2, ..")
    return int(text)


def seconds(text: str) -> float:
    """Returns a time of at least 0 seconds."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"invalid time: {text!r}; give seconds, 0 or more")
    return float(value)


def script(text: str) -> Path:
    """Returns the path of a script, which must exist, and whose packages must be installed."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}; give a training script")
    for package in missing_packages(Path(text)):
        raise argparse.ArgumentTypeError(
            f"{text} imports {package}, which is not installed: {INSTALLED_BY[package]}"
        )
    return Path(text)


class Module(str):
    """The name of a module that is run as ``python -m`` runs it."""

    __slots__ = ()


def module(text: str) -> Module:
    """Returns the name of a module, which must be in the working directory or on Python's path."""
    top = text.partition(".")[0]
    if not top or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise argparse.ArgumentTypeError(
            f"there is no module {text}; give the name of a training module, as for python -m"
        )
    return Module(text)


def new_file(text: str) -> Path:
    """Returns the absolute path of a file to write, after a check that it can be written."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {path.parent}; make it, or give a file in a folder that is there"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give the name of a file")
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # nor a device or a pipe
            _write_into(path.parent)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot use {path}: {error.strerror}; give a file that can be written"
        ) from None
    # Absolute, since a script may change the working directory before the file is written.
    return path.absolute()


def require_folder(name: str, folder: Path | str) -> None:
    """Makes a folder for later files, after a check that it can be written to.

    Args:
        name: The option, as the user types it.
        folder: The folder, which may exist.

    Raises:
        ConfigError: The folder cannot be made, or not be written to.
    """
    with using(name, folder, "a folder that can be written"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write_into(Path(folder))


def _write_into(folder: Path) -> None:
    """Checks that files can be written into a folder, by a temporary one with data in it.

    A full disk still takes empty files.

    Raises:
        OSError: The folder cannot be written to.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


@contextmanager
def using(name: str, path: Path | str, give: str) -> Iterator[None]:
    """Opens a context in which an error of a file becomes a ``ConfigError`` about the argument.

    Args:
        name: The argument, as the user types it.
        path: The file.
        give: A phrase for what the user should give, such as "a file that can be read".

    Raises:
        ConfigError: The file cannot be used, or is no text in UTF-8.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it holds no text in UTF-8"
        if isinstance(error, FileExistsError):
            cause = "there is a file of that name"
        raise ConfigError(f"{name}: cannot use {path}", cause=cause, fix=f"give {give}") from error
