"""Makes every module below ``paddle.distributed.fleet`` importable below ``fleetpipe.fleet``.

What fleetpipe adds stands in files of this package; every other name is Paddle's very module, not
a second copy of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

OURS = "fleetpipe.fleet"
PADDLES = "paddle.distributed.fleet"
_FOLDER = Path(__file__).parent


class _PaddleModule(Loader):
    """Hands out a module that Paddle has loaded, and leaves its ``__spec__`` as Paddle's."""

    def __init__(self, name: str) -> None:
        self._module = importlib.import_module(name)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    """Answers for ``fleetpipe.fleet.*`` where this package has no file of that name.

    It must stand before the path finder: the packages it hands out carry Paddle's ``__path__``,
    in which the path finder would find their submodules and load them a second time.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(OURS + ".") or _is_ours(fullname):
            return None
        theirs = PADDLES + fullname[len(OURS) :]
        try:
            loader = _PaddleModule(theirs)
        except ModuleNotFoundError as error:
            if error.name != theirs:
                raise
            return None
        return ModuleSpec(fullname, loader)


def _is_ours(fullname: str) -> bool:
    file = _FOLDER.joinpath(*fullname[len(OURS) + 1 :].split("."))
    return file.with_suffix(".py").exists() or (file / "__init__.py").exists()


def install() -> None:
    """Puts the finder in front, once, and shares the modules that Paddle has loaded already.

    Sharing them now keeps an import from binding a module over the attribute of the same name:
    ``fleet.fleet`` is Paddle's singleton, and ``paddle.distributed.fleet.fleet`` also a module.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        ours = OURS + name[len(PADDLES) :]
        if name.startswith(PADDLES + ".") and not _is_ours(ours):
            sys.modules.setdefault(ours, module)
