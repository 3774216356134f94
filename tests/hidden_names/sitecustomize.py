"""Hides from the package's own files what a system lacks; Python, Paddle and tests keep theirs.

What is missing is what mypy's stubs of the standard library say, and it is missed as it is there:
by ImportError, AttributeError and FileNotFoundError. Paddle loses what its wheel for that system
(3.3.1) does not have.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

SYSTEM = os.environ.get("FLEETPIPE_TEST_SYSTEM", "")
PLATFORM = SYSTEM if SYSTEM in ("darwin", "win32") else "linux"
ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT}/{name}/" for name in ("fleetpipe", "dygraph", "static", "examples"))
STANDARD = (str(Path(os.__file__).parent) + "/", "<frozen")
MODULES = ("os", "socket", "signal", "mmap", "select", "time", "resource", "fcntl", "termios")
MODULES += ("pwd", "grp", "pty", "tty", "posix", "syslog")
PATHS = {
    "no-boot-id": ("/proc/sys/kernel/random/boot_id",),
    "darwin": ("/proc", "/dev/shm", "/sys"),
    "win32": ("/proc", "/dev", "/sys"),
}
#: What a stub imports from these is no name of its module.
FOR_TYPES = ("_typeshed", "builtins", "collections.abc", "types", "typing", "typing_extensions")
#: What Python has there beside what the stubs say.
ALSO = {"darwin": {"socket": {"MSG_NOSIGNAL"}, "os": {"preadv"}}}
#: Names of Paddle's core that the wheels for macOS and Windows do not have.
OF_CORE = ("ProcessGroupGloo", "GlooParallelContext", "GLOOParallelContext", "GlooParallelStrategy")


def is_own(depth: int) -> bool:
    """Whether a file of the package called."""
    return sys._getframe(depth).f_code.co_filename.startswith(OWN)


def is_owns_path(depth: int) -> bool:
    """Whether a file of the package called, itself or through the standard library."""
    frame: Any = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(STANDARD):
        if "site-packages" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OWN)


def holds(test: ast.expr, platform: str) -> bool:
    """Evaluates a condition of a stub: on the platform, or on Python's version."""
    places = {"platform": platform, "version_info": sys.version_info}
    code = compile(ast.Expression(test), "stub", "eval")
    try:
        return bool(eval(code, {"sys": type("sys", (), places), "TYPE_CHECKING": True}))
    except (NameError, AttributeError):
        return True


def names(body: list[ast.stmt], platform: str) -> Iterator[str]:
    """Yields the names that a stub defines on a platform."""
    for node in body:
        if isinstance(node, ast.If):
            yield from names(node.body if holds(node.test, platform) else node.orelse, platform)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.module not in FOR_TYPES:
            yield from (alias.asname or alias.name for alias in node.names)


def missing() -> dict[str, set[str] | None]:
    """Returns by module the names that the system lacks; None where it lacks the module."""
    stubs = next(
        place for path in sys.path if (place := Path(path, "mypy/typeshed/stdlib")).is_dir()
    )
    found: dict[str, set[str] | None] = {}
    for module in MODULES:
        places = (stubs / f"{module}.pyi", stubs / module / "__init__.pyi")
        body = ast.parse(next(filter(Path.exists, places)).read_text(encoding="utf-8")).body
        here, there = (set(names(body, platform)) for platform in ("linux", PLATFORM))
        gone = (here - there) | ALSO.get(SYSTEM, {}).get(module, set())
        found[module] = gone if any(name[0] != "_" for name in there) else None
    return found


def hide_names(
    module: Any, gone: set[str], other: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Has the package miss names of a module, or find other values; everybody else finds them."""
    names_gone = {*gone, *other} & set(vars(module))
    values = {name: vars(module).pop(name) for name in names_gone}

    def get(name: str) -> Any:
        found = other if is_own(2) else values
        if name in found:
            return found[name]
        raise AttributeError(f"module '{module.__name__}' has no attribute '{name}'")

    module.__getattr__ = get


def hide_modules(gone: set[str]) -> None:
    """Has the package fail to import modules; and Paddle's core lose names once it is there."""
    stock = builtins.__import__

    def own_import(name: str, *args: Any, **named: Any) -> Any:
        if name.partition(".")[0] in gone and is_own(2):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        found = stock(name, *args, **named)
        if name.startswith("paddle") and is_own(2) and PLATFORM != "linux":
            for core in map(sys.modules.get, ("paddle.base.core", "paddle.base.libpaddle")):
                for one in OF_CORE:
                    if isinstance(vars(core).get(one), type):  # else it is what stands in for it
                        delattr(core, one)
        return found

    builtins.__import__ = own_import


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of paths that finds none of those that the system lacks."""

    def call(path: Any, *args: Any, **named: Any) -> Any:
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        gone = any(f"{text}/".startswith(f"{one}/") for one in PATHS[SYSTEM])
        if gone and text != os.devnull and is_owns_path(2):
            if function.__name__ == "access":
                return False
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *args, **named)

    return call


def as_windows_does(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``open`` with the defaults of Windows: its encoding, its ends of lines."""

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **named: Any) -> Any:
        values = dict(zip(("encoding", "errors", "newline", "closefd", "opener"), args), **named)
        if "b" not in mode and is_owns_path(2):
            if values.get("encoding") in (None, "locale"):
                values["encoding"] = "cp1252"
            if values.get("newline") is None and mode[0] != "r":
                values["newline"] = "\r\n"
        return stock(file, mode, buffering, **values)

    return opened


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Fails where the system's kernel would, told by Python's audit."""
    if event == "socket.bind" and SYSTEM == "darwin" and is_owns_path(2):
        if str(arguments[1]).startswith("\0"):
            raise FileNotFoundError(2, "No such file or directory")
    elif event == "fcntl.ioctl" and SYSTEM == "darwin" and is_owns_path(2):
        raise OSError(25, "Inappropriate ioctl for device")
    elif event == "os.kill" and SYSTEM == "win32" and is_owns_path(2):
        raise AssertionError("on Windows os.kill ends the process, whatever the signal")
    elif event == "os.symlink" and SYSTEM == "win32" and is_owns_path(2):
        raise OSError(22, "a required privilege is not held by the client")


def only_windows() -> None:
    """Changes what is there on Windows, and is another thing."""
    stock_rename, stock_library, stock_map, stock_open = os.rename, ctypes.CDLL, mmap.mmap, os.open

    def rename(source: Any, target: Any, **named: Any) -> None:
        if os.path.lexists(target) and is_owns_path(2):
            raise FileExistsError(17, "Cannot create a file when that file already exists", target)
        stock_rename(source, target, **named)

    class Library(stock_library):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *args: Any, **named: Any) -> None:
            if name is None and is_owns_path(2):
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *args, **named)

    class Map(stock_map):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **named: Any) -> Any:
            if {"flags", "prot"} & set(named) and is_owns_path(2):
                raise TypeError("mmap() got an unexpected keyword argument")
            return super().__new__(cls, *args, **named)

    def open_file(path: Any, *args: Any, **named: Any) -> Any:
        if os.path.isdir(path) and is_owns_path(2):
            raise PermissionError(13, "Permission denied", path)
        return stock_open(path, *args, **named)

    os.rename, ctypes.CDLL, mmap.mmap, os.open = rename, Library, Map, open_file  # type: ignore
    io.open = builtins.open = as_windows_does(io.open)  # type: ignore[assignment]


def hide() -> None:
    """Hides everything."""
    if PLATFORM != "linux":
        absent = missing()
        for module in MODULES:
            if (gone := absent[module]) is not None:
                hide_names(importlib.import_module(module), gone)
        hide_names(sys, set(), {"platform": PLATFORM})
        hide_modules({module for module, gone in absent.items() if gone is None})
        sys.addaudithook(refuse)
    if SYSTEM == "win32":
        only_windows()
    for name in ("open", "stat", "readlink", "access", "listdir"):
        setattr(os, name, guarded(getattr(os, name)))
    io.open = builtins.open = guarded(io.open)  # type: ignore[assignment]


if SYSTEM:
    if SYSTEM not in PATHS:
        raise SystemExit(f"FLEETPIPE_TEST_SYSTEM is {SYSTEM!r}: it is one of {', '.join(PATHS)}")
    hide()
