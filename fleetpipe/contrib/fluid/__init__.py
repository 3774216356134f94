"""Provides the names of older Paddle that PaddleFleetX's documents and scripts use.

Paddle 2.5 removed ``paddle.fluid``. While a script runs under ``fleetpipe run``, or after
``fleetpipe.install()``, the names of the table ``NAMES`` exist (``provide``), and any other name of
``paddle.fluid`` raises an error with its successor.

If a successor takes other arguments, or is missing in PIR, a function of this file takes the old
arguments and makes today's layers, which work in both representations of programs.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple, NoReturn

from fleetpipe.aliases import Attribute, Variable
from fleetpipe.errors import FleetPipeError
from fleetpipe.extras import Finder
from fleetpipe.paddle_api import paddle, replaced
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.static import DataLoader

_Format = Literal["NCHW", "NHWC"]
_functional = paddle.nn.functional

FLUID = "paddle.fluid"

#: The modules of Paddle in which a name of ``paddle.fluid`` is looked up, in this order.
_SEARCHED_MODULES = (
    *("paddle", "paddle.static", "paddle.static.nn", "paddle.nn", "paddle.nn.functional"),
    *("paddle.nn.initializer", "paddle.optimizer", "paddle.optimizer.lr", "paddle.regularizer"),
    *("paddle.metric", "paddle.io", "paddle.utils", "paddle.base"),
)
#: Older names, with the names that have replaced them.
_RENAMED = {
    "elementwise_sub": "subtract",
    "elementwise_mul": "multiply",
    "elementwise_div": "divide",
    "fill_constant": "full",
    "guard": "disable_static",
    "Xavier": "XavierUniform",
    "MSRA": "KaimingUniform",
    "save_dygraph": "save",
    "load_dygraph": "load",
    "Pool2D": "MaxPool2D",
    "InstanceNorm": "InstanceNorm2D",
    "PRelu": "PReLU",
    "l2_normalize": "normalize",
    "uniform_random": "uniform",
    "gaussian_random": "normal",
    "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish",
    "image_resize": "interpolate",
    "sums": "add_n",
    "GradientClipByGlobalNorm": "ClipGradByGlobalNorm",
    "GradientClipByNorm": "ClipGradByNorm",
    "GradientClipByValue": "ClipGradByValue",
}
#: The parts of older names that Paddle has dropped, as in ``reduce_sum`` and ``AdamOptimizer``.
_DROPPED_PARTS = re.compile(r"^(elementwise|reduce)_|(Optimizer|Initializer|Regularizer)$")


def conv2d(
    input: Variable,
    num_filters: int,
    filter_size: int,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    act: str | None = None,
    name: str | None = None,
    data_format: _Format = "NCHW",
) -> Variable:
    """Convolves images with new trainable filters."""
    layer = paddle.nn.Conv2D(
        _channel_count(input, data_format),
        num_filters,
        filter_size,
        stride,
        padding,
        groups=groups,
        weight_attr=param_attr,
        bias_attr=bias_attr,
        data_format=data_format,
    )
    return _activate(layer(input), act)


def batch_norm(
    input: Variable,
    act: str | None = None,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    data_layout: _Format = "NCHW",
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
) -> Variable:
    """Normalises each channel over a micro-batch, and learns its scale and offset."""
    layer = paddle.nn.BatchNorm(
        _channel_count(input, data_layout),
        param_attr=param_attr,
        bias_attr=bias_attr,
        data_layout=data_layout,
        moving_mean_name=moving_mean_name,
        moving_variance_name=moving_variance_name,
    )
    return _activate(layer(input), act)


def pool2d(
    input: Variable,
    pool_size: int = -1,
    pool_type: str = "max",
    pool_stride: int = 1,
    pool_padding: int = 0,
    global_pooling: bool = False,
    data_format: _Format = "NCHW",
) -> Variable:
    """Takes the maximum or the mean of each window of the images, or of whole images."""
    maximum = pool_type == "max"
    if global_pooling:
        over = paddle.max if maximum else paddle.mean
        return over(input, [2, 3] if data_format == "NCHW" else [1, 2], keepdim=True)
    pooled = _functional.max_pool2d if maximum else _functional.avg_pool2d
    return pooled(input, pool_size, pool_stride, pool_padding, data_format=data_format)


def fc(
    input: Variable,
    size: int,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    act: str | None = None,
) -> Variable:
    """Flattens each row, multiplies it by a new trainable matrix, and adds a bias."""
    return paddle.static.nn.fc(
        input, size, weight_attr=param_attr, bias_attr=bias_attr, activation=act
    )


def elementwise_add(
    x: Variable, y: Variable, act: str | None = None, name: str | None = None
) -> Variable:
    """Adds two values of one shape."""
    return _activate(paddle.add(x, y), act)


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    padding_idx: int | None = None,
    param_attr: Attribute = None,
) -> Variable:
    """Looks up rows in a new trainable table; PIR lacks Paddle's ``static.nn.embedding``."""
    rows, width = size
    layer = paddle.nn.Embedding(
        rows, width, padding_idx=padding_idx, sparse=is_sparse, weight_attr=param_attr
    )
    return layer(input)


def _channel_count(images: Variable, data_format: _Format) -> int:
    return int(images.shape[1 if data_format == "NCHW" else -1])


def _activate(value: Variable, act: str | None) -> Variable:
    """Applies the activation that ``act`` names, if any."""
    return getattr(_functional, act)(value) if act else value


class Older(NamedTuple):
    """A name of older versions of Paddle.

    Attributes:
        old: The name, below ``paddle``.
        today: The dotted name of its successor.
        stand_in: The object that replaces the successor if that takes other arguments.
    """

    old: str
    today: str
    stand_in: object = None


class _CPUPlace(paddle.CPUPlace):
    """Replaces ``paddle.CUDAPlace`` on machines without a GPU; Paddle's own ends the process there.

    The number of a GPU that a script passes has no effect.
    """

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
    Older("static.nn.embedding", "paddle.nn.Embedding", embedding),
    Older("CUDAPlace", "paddle.CPUPlace", _CPUPlace),
    Older("fluid.ParamAttr", "paddle.ParamAttr"),
    Older("fluid.param_attr.ParamAttr", "paddle.ParamAttr"),
    Older("fluid.initializer.Uniform", "paddle.nn.initializer.Uniform"),
    Older("fluid.layers.conv2d", "paddle.nn.Conv2D", conv2d),
    Older("fluid.layers.batch_norm", "paddle.nn.BatchNorm2D", batch_norm),
    Older("fluid.layers.pool2d", "paddle.nn.functional.max_pool2d", pool2d),
    Older("fluid.layers.fc", "paddle.static.nn.fc", fc),
    Older("fluid.layers.elementwise_add", "paddle.add", elementwise_add),
    Older("fluid.core", "paddle.base.core"),
    Older("fluid.framework", "paddle.base.framework"),
    Older("fluid.dygraph.base", "paddle.base.dygraph.base"),
    Older("fluid.dygraph.to_variable", "paddle.to_tensor"),
    Older("fluid.data_feeder.convert_dtype", "paddle.base.data_feeder.convert_dtype"),
    Older("fluid.reader.use_pinned_memory", "paddle.base.reader.use_pinned_memory"),
)


class FluidName(FleetPipeError, AttributeError):
    """Raised for an attribute that ``paddle.fluid`` does not have under fleetpipe."""


class FluidImport(FleetPipeError, ImportError):
    """Raised for an import that ``paddle.fluid`` does not have under fleetpipe."""


class _FluidModule(ModuleType):
    """``paddle.fluid``, or a module of it."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FluidName(**_error_arguments(f"{self.__name__}.{name}"))


def _refuse_import(fullname: str) -> None:
    """Raises FluidImport for a module below ``paddle.fluid`` that does not exist."""
    if fullname.startswith(f"{FLUID}."):
        raise FluidImport(**_error_arguments(fullname))


def _error_arguments(name: str) -> dict[str, Any]:
    """Returns the arguments of the error for a name of ``paddle.fluid`` that does not exist."""
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
    """Returns the dotted name of the successor of an older name; None if it has none.

    Args:
        old: The older name; only its last part counts.
    """
    last = old.rpartition(".")[2]
    for name in (_RENAMED.get(last, last), _DROPPED_PARTS.sub("", last)):
        for module in _SEARCHED_MODULES:
            if getattr(importlib.import_module(module), name, None) is not None:
                return f"{module}.{name}"
    return None


@contextmanager
def provide() -> Iterator[None]:
    """Opens a context in which Paddle has the older names of the table :data:`NAMES`."""
    with ExitStack() as undo:
        finder = Finder(_refuse_import)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        for name in NAMES:
            if not _paddle_has(name):
                _add_name(name, undo)
        yield


def _paddle_has(name: Older) -> bool:
    """Returns whether Paddle has a working object under an older name, so that none is added."""
    if name.old == "static.nn.embedding":
        return not paddle.base.framework.use_pir_api()
    return name.old == "CUDAPlace" and device_kind() == "gpu"


def _add_name(name: Older, undo: ExitStack) -> None:
    """Adds a name to Paddle, and the modules above it that do not exist.

    Args:
        name: The name.
        undo: Gets the functions that remove the name and the modules again.
    """
    path, _, last = f"paddle.{name.old}".rpartition(".")
    value = name.stand_in or _object_at(name.today)
    undo.enter_context(replaced((_module_or_class_at(path, undo), last, value)))
    if isinstance(value, ModuleType):
        sys.modules[f"{path}.{last}"] = value
        undo.callback(sys.modules.pop, f"{path}.{last}", None)


def _module_or_class_at(path: str, undo: ExitStack) -> Any:
    """Returns the module or class at a dotted path; makes a missing module of ``paddle.fluid``.

    Args:
        path: The path.
        undo: Gets the functions that remove the modules that are made.
    """
    if not f"{path}.".startswith(f"{FLUID}."):
        return _object_at(path)
    if path not in sys.modules:
        module = _FluidModule(path)
        # A package, so that imports from it reach the finder.
        module.__path__ = []
        sys.modules[path] = module
        undo.callback(sys.modules.pop, path, None)
        above, _, last = path.rpartition(".")
        undo.enter_context(replaced((_module_or_class_at(above, undo), last, module)))
    return sys.modules[path]


def _object_at(path: str) -> Any:
    """Returns the object at a dotted path, which may lead into a class."""
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:index]))
        value = getattr(value, part)
    return value
