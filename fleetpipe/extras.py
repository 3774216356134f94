"""Loads modules on demand: fleetpipe's extras, and optional packages."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fleetpipe.errors import PackageNotFound

#: The command that installs each optional package, by the name under which it is imported.
INSTALLED_BY = {
    "matplotlib": "pip install 'fleetpipe[examples]'",
    "mlflow": "pip install mlflow",
    "prometheus_client": "pip install 'fleetpipe[watch]'",
    "pyarrow": "pip install pyarrow",
    "ray": "pip install 'fleetpipe[ray]'",
    "rich": "pip install 'fleetpipe[watch]'",
    "safetensors": "pip install safetensors",
    "shtab": "pip install shtab",
    "sklearn": "pip install scikit-learn",
    "tensorboardX": "pip install tensorboardX",
    "tokenizers": "pip install 'fleetpipe[text]'",
    "wandb": "pip install wandb",
    "jsonargparse": "pip install 'fleetpipe[project]'",
    "yaml": "pip install 'fleetpipe[project]'",
}


def extra(name: str) -> Any:
    """Returns a module of ``fleetpipe.contrib``, which the core and the standard ring never import.

    Args:
        name: The module's path below ``contrib``, such as ``"view.reporting"``.
    """
    return importlib.import_module(f"fleetpipe.contrib.{name}")


def late(names: Mapping[str, str]) -> Callable[[str], object]:
    """Returns a ``__getattr__`` for a package, which loads public names when they are first used.

    Args:
        names: The module of each name. If the module lacks the name, the name is the module itself.
    """

    def get(name: str) -> object:
        """Loads and returns the public name, or raises an AttributeError."""
        if name not in names:
            raise AttributeError(f"there is no {name!r}; expected: {', '.join(names)}", name=name)
        with needed_for(name):
            module = importlib.import_module(names[name])
        return getattr(module, name, module)

    return get


class _SharedModule(Loader):
    """Makes ``import`` return an already loaded module under a second name.

    The module's ``__spec__`` stays that of its first name.
    """

    def __init__(self, name: str) -> None:
        self._module = importlib.import_module(name)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module, of which Python then sets ``__spec__`` to ``spec``."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own ``__spec__``, which the import has replaced."""
        module.__spec__ = self._spec


def spec_of(alias: str, name: str) -> ModuleSpec | None:
    """Returns a spec that imports the module ``name`` as ``alias``; None if there is no module.

    The finder that returns this spec must stand before the path finder, which would find the
    submodules of a package by its ``__path__`` and load them again.

    Args:
        alias: The other name.
        name: The module's own name.
    """
    try:
        return ModuleSpec(alias, _SharedModule(name))
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


class Finder(MetaPathFinder):
    """Finds modules by a function of their names, before Python's own finders."""

    def __init__(self, find: Callable[[str], ModuleSpec | None]) -> None:
        self.find = find

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module, or None for one that Python's own finders look for."""
        return self.find(fullname)

    def install(self) -> None:
        """Puts the finder in front, unless a finder with the same function is installed."""
        finders = [finder for finder in sys.meta_path if isinstance(finder, Finder)]
        if not any(finder.find is self.find for finder in finders):
            sys.meta_path.insert(0, self)


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Opens a context in which the error of a failing import says how to install the package.

    Args:
        purpose: A clause for what the package is for, such as "a completion is printed".

    Raises:
        PackageNotFound: A package of ``INSTALLED_BY`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in INSTALLED_BY:
            raise
        raise PackageNotFound(
            f"{purpose}: {name} is needed, which is not installed", fix=INSTALLED_BY[name]
        ) from error


def missing_packages(script: Path) -> list[str]:
    """Returns the packages of ``INSTALLED_BY`` that a script imports and that are not installed.

    Only imports at the top of the script count, and those of modules beside it that it imports. A
    file that changes ``sys.path`` may find packages elsewhere, so its imports are not reported.
    """
    packages = sorted({*_optional_imports(script, {script})})
    return [name for name in packages if find_spec(name) is None]


def _optional_imports(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yields the packages of ``INSTALLED_BY`` that a file and modules beside it import.

    Args:
        file: A Python file.
        seen: The files that were read before; the files that are read are added.
    """
    try:
        source = file.read_bytes()
        body = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        return  # Python will say so
    if b"sys.path" in source:
        return
    for name in _imported_packages(body):
        beside = file.with_name(f"{name}.py")
        if beside.is_file():
            if beside not in seen:
                seen.add(beside)
                yield from _optional_imports(beside, seen)
        elif name in INSTALLED_BY and not file.with_name(name).is_dir():
            yield name


def _imported_packages(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yields the top-level packages that some statements import unconditionally."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.With):
            yield from _imported_packages(node.body)
