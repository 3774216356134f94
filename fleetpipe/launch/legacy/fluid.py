"""The names of older Paddle that PaddleFleetX's documents and scripts use, and what they are today.

``paddle.fluid`` is gone since Paddle 2.5. While a script runs under ``fleetpipe run``, or after
``fleetpipe.install()``, the names of one table are there, and asking for any other name of
``paddle.fluid`` is an error that says what has its place today.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from fleetpipe.errors import FleetPipeError
from fleetpipe.launch.legacy import fluid_layers
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.static import DataLoader

FLUID = "paddle.fluid"


class Older(NamedTuple):
    """A name of older Paddle.

    Attributes:
        old: The name, below ``paddle``.
        today: What has its place in Paddle today.
        stand_in: What stands there instead of ``today``, where that takes other arguments.
    """

    old: str
    today: str
    stand_in: object = None


class _CPUPlace(paddle.CPUPlace):
    """What ``paddle.CUDAPlace(0)`` is where no GPU is, and Paddle would end the process."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()


NAMES = (
    Older("fluid.device_guard", "paddle.static.device_guard"),
    Older("fluid.dygraph.Layer", "paddle.nn.Layer"),
    Older("fluid.dygraph.layers.Layer", "paddle.nn.Layer"),
    Older("fluid.dygraph.container.Sequential", "paddle.nn.Sequential"),
    Older(
        "io.DataLoader.from_generator",
        "fleetpipe.static.DataLoader.from_generator",
        DataLoader.from_generator,
    ),
    Older("static.nn.embedding", "paddle.nn.Embedding", fluid_layers.embedding),
    Older("CUDAPlace", "paddle.CPUPlace", _CPUPlace),
    Older("fluid.ParamAttr", "paddle.ParamAttr"),
    Older("fluid.param_attr.ParamAttr", "paddle.ParamAttr"),
    Older("fluid.initializer.Uniform", "paddle.nn.initializer.Uniform"),
    Older("fluid.layers.conv2d", "paddle.nn.Conv2D", fluid_layers.conv2d),
    Older("fluid.layers.batch_norm", "paddle.nn.BatchNorm2D", fluid_layers.batch_norm),
    Older("fluid.layers.pool2d", "paddle.nn.functional.max_pool2d", fluid_layers.pool2d),
    Older("fluid.layers.fc", "paddle.static.nn.fc", fluid_layers.fc),
    Older("fluid.layers.elementwise_add", "paddle.add", fluid_layers.elementwise_add),
    Older("fluid.core", "paddle.base.core"),
    Older("fluid.framework", "paddle.base.framework"),
    Older("fluid.dygraph.base", "paddle.base.dygraph.base"),
    Older("fluid.dygraph.to_variable", "paddle.to_tensor"),
    Older("fluid.data_feeder.convert_dtype", "paddle.base.data_feeder.convert_dtype"),
    Older("fluid.reader.use_pinned_memory", "paddle.base.reader.use_pinned_memory"),
)

#: Where Paddle has what ``paddle.fluid`` had, in the order in which a name is looked for.
_HOMES = (
    "paddle",
    "paddle.static",
    "paddle.static.nn",
    "paddle.nn",
    "paddle.nn.functional",
    "paddle.nn.initializer",
    "paddle.optimizer",
    "paddle.optimizer.lr",
    "paddle.regularizer",
    "paddle.metric",
    "paddle.io",
    "paddle.utils",
    "paddle.base",
)
#: Names that are others today, and parts of names that are left out.
_RENAMED = {
    "elementwise_sub": "subtract",
    "elementwise_mul": "multiply",
    "elementwise_div": "divide",
    "fill_constant": "full",
    "guard": "disable_static",
}
_LEFT_OUT = re.compile(r"^(elementwise|reduce)_|(Optimizer|Initializer)$")


class FluidName(FleetPipeError, AttributeError):
    """A name that ``paddle.fluid`` does not have here."""


class FluidImport(FleetPipeError, ImportError):
    """An import of a name that ``paddle.fluid`` does not have here."""


class _Module(ModuleType):
    """``paddle.fluid``, or a module of it."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FluidName(**_gone(f"{self.__name__}.{name}"))


class _Finder(MetaPathFinder):
    """Is asked for what is imported from ``paddle.fluid`` and is not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{FLUID}."):
            raise FluidImport(**_gone(fullname))
        return None


def _gone(name: str) -> dict[str, Any]:
    today = name_today(name)
    return {
        "summary": f"{name} is gone since Paddle 2.5, and is not among the names that fleetpipe "
        "provides",
        "cause": None if today else "Paddle has nothing of this name today",
        "fix": f"write {today}; its arguments may be others"
        if today
        else "see the table of names in docs/coming-from-fleetx.md",
    }


def name_today(old: str) -> str | None:
    """Returns the dotted name that Paddle has in the place of an older one; None where it has none.

    Args:
        old: The older name; only its last part counts.
    """
    last = old.rpartition(".")[2]
    for name in (_RENAMED.get(last, last), _LEFT_OUT.sub("", last)):
        for home in _HOMES:
            if getattr(importlib.import_module(home), name, None) is not None:
                return f"{home}.{name}"
    return None


@contextmanager
def provided() -> Iterator[None]:
    """Within it, the names of the table are there."""
    with ExitStack() as undo:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        for name in NAMES:
            if not _paddle_has(name):
                _put(name, undo)
        yield


def _paddle_has(name: Older) -> bool:
    """Tells whether this Paddle has what works under the name."""
    if name.old == "static.nn.embedding":
        return not paddle.base.framework.use_pir_api()
    return name.old == "CUDAPlace" and device_kind() == "gpu"


def _put(name: Older, undo: ExitStack) -> None:
    """Puts a name in its place, and the modules above it that are not there."""
    path, _, last = f"paddle.{name.old}".rpartition(".")
    value = name.stand_in or _named(name.today)
    _set(_owner(path, undo), last, value, undo)
    if isinstance(value, ModuleType):
        sys.modules[f"{path}.{last}"] = value
        undo.callback(sys.modules.pop, f"{path}.{last}", None)


def _owner(path: str, undo: ExitStack) -> Any:
    """Returns the module or class of a path; a module of ``paddle.fluid`` is made."""
    if not f"{path}.".startswith(f"{FLUID}."):
        return _named(path)
    if path not in sys.modules:
        module = _Module(path)
        # A package: what is imported from it is asked of the finder.
        module.__path__ = []
        sys.modules[path] = module
        undo.callback(sys.modules.pop, path, None)
        above, _, last = path.rpartition(".")
        _set(_owner(above, undo), last, module, undo)
    return sys.modules[path]


def _named(path: str) -> Any:
    """Returns what has a dotted name, which may be inside a class."""
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:index]))
        value = getattr(value, part)
    return value


def _set(owner: Any, name: str, value: object, undo: ExitStack) -> None:
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
