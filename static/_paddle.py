"""The private names of Paddle that both IRs of static graph need, for paddlepaddle 2.6.2 and 3.3.

Scopes, the executor below ``Executor``, dense tensors and the dynamic tensors that share their
data, the random generator, and the two functions that the hooks take the place of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from paddle.base import core as _core
from paddle.base import framework as _framework
from paddle.static import io as _static_io

from fleetpipe.aliases import Optimizer, Place, Program, Scope, ScopeTensor, Tensor, Variable
from fleetpipe.paddle_api import paddle

# Their stubs hide what this module reaches for.
core: Any = _core
framework: Any = _framework
static: Any = paddle.static
#: Where ``paddle.static`` has its functions for saving from.
static_io: Any = _static_io
_incubate: Any = paddle.incubate

#: The class of a tensor in a scope: 2.6.2 calls it otherwise.
DenseTensor: Any = getattr(core, "DenseTensor", None) or core.LoDTensor
Executor: Any = static.Executor
#: What a loader's end raises, in Paddle's own loaders as well.
EOFException: Any = core.EOFException

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_FOREIGN = (os.path.dirname(paddle.__file__), _PACKAGE, os.path.dirname(_PACKAGE) + "/fleetpipe/")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_IMPORTLIB = "<frozen "


def is_pir(program: Program) -> bool:
    """Whether a program is of Paddle's newer IR."""
    return not isinstance(program, framework.Program)


def dtype_name(value: Variable) -> str:
    """Returns the name of the dtype of a program's value, as ``float32``."""
    name: str = paddle.base.data_feeder.convert_dtype(value.dtype)
    return "bfloat16" if name == "uint16" else name


def user_line(stack: Iterable[str]) -> str:
    """Returns the innermost frame of a stack that is neither Paddle's nor fleetpipe's."""
    line = ""
    for frame in stack:
        match = _FRAME.search(frame)
        if match and not match[1].startswith((*_FOREIGN, _IMPORTLIB)):
            line = f"{match[1]}, line {match[2]}"
    return line


def tensor_of(scope: Scope, name: str) -> ScopeTensor:
    """Returns the dense tensor of a variable of a scope, which is made where there is none."""
    return scope.var(name).get_tensor()


def found_tensor(scope: Scope, name: str) -> ScopeTensor | None:
    """Returns the dense tensor of a variable; None where it does not exist or holds nothing."""
    variable = scope.find_var(name)
    tensor = None if variable is None else variable.get_tensor()
    return tensor if tensor is not None and tensor._is_initialized() else None


def overwrite(tensor: ScopeTensor, array: np.ndarray) -> None:
    """Gives a dense tensor other numbers, on the device that it is on."""
    place = tensor._place()
    if place.is_gpu_place():
        tensor.set(array, core.CUDAPlace(place.gpu_device_id()))
    else:
        tensor.set(array, core.CPUPlace())


def taken(source: ScopeTensor) -> ScopeTensor | list[int]:
    """Returns what a dense tensor holds: another that shares its data, or a shape alone."""
    if not source._is_initialized():
        return source.shape()
    tensor = DenseTensor()
    tensor._share_data_with(source)
    return tensor


def put_back(tensor: ScopeTensor, held: ScopeTensor | list[int]) -> None:
    """Gives a dense tensor what :func:`taken` returned."""
    if isinstance(held, list):
        tensor._set_dims(held)
    else:
        tensor._share_data_with(held)


def dynamic(source: ScopeTensor) -> Tensor:
    """Returns a dynamic tensor with the data of a dense one; in dynamic mode only."""
    return core.eager.Tensor(source)


def job_executor(program: Program, scope: Scope, place: Place) -> Any:
    """Returns what runs a program by ``.run([], False)``, without ``Executor``'s work per run.

    Args:
        program: A native program; its persistable variables live in ``scope``.
        scope: A scope without a parent.
        place: The device.
    """
    description = program if is_pir(program) else program.desc
    plan = core.Plan([core.Job("default")], {"default": description})
    return core.StandaloneExecutor(_place(place), plan, scope)


def _place(place: Place) -> Place:
    native = core.Place()
    native.set_place(place)
    return native


def random_state(place: Place) -> Any:
    """Returns the generator that the random operations of a device draw from."""
    if isinstance(place, core.CUDAPlace):
        return core.default_cuda_generator(place.get_device_id())
    return core.default_cpu_generator()


def swap_switch_device(
    replacement: Callable[[str | None], object],
) -> Callable[[str | None], object]:
    """Has every ``device_guard`` call ``replacement(device)``; returns what it called before."""
    original: Callable[[str | None], object] = framework.switch_device
    framework.switch_device = replacement
    return original


def learning_rate(optimizer: Optimizer) -> Any:
    """Returns the optimizer's learning rate: a number or a scheduler."""
    return optimizer._learning_rate


def state_of(
    optimizer: Optimizer, parameter: str, named: Callable[[Variable], str]
) -> tuple[dict[str, str], str | None]:
    """Returns what an optimizer that was applied keeps of a parameter.

    Args:
        optimizer: It.
        parameter: The name of the parameter.
        named: Returns the name of a variable of the program.

    Returns:
        The variable of each kind, as ``moment1``, and that of the float32 copy, or None.
    """
    master = optimizer._master_weights.get(parameter)
    names = [parameter] if master is None else [parameter, named(master)]
    prefix = "" if optimizer._name is None else f"{optimizer._name}_"
    accumulators = {
        kind.removeprefix(prefix): named(of[name])
        for kind, of in optimizer._accumulators.items()
        for name in names
        if name in of
    }
    return accumulators, None if master is None else named(master)


def rate_of(optimizer: Optimizer, program: Program) -> Variable:
    """Returns the variable of the learning rate in a program that an optimizer was applied to."""
    return optimizer._learning_rate_map[program]


def gradient_clip(optimizer: Optimizer) -> Any:
    """Returns the optimizer's gradient clip, or None."""
    return getattr(optimizer, "_grad_clip", None)


def is_decorated(optimizer: Optimizer) -> bool:
    """Whether ``paddle.static.amp.decorate`` made an optimizer."""
    return isinstance(optimizer, static.amp.decorator.OptimizerWithMixedPrecision)


def recomputing(optimizer: Optimizer) -> tuple[Optimizer, list[Variable | str] | None, bool]:
    """Takes Paddle's ``RecomputeOptimizer`` apart.

    Returns:
        The optimizer that it wraps, or the one that was given; its checkpoints, None where it is
        another optimizer; whether these are to be kept on another device.
    """
    if not isinstance(optimizer, _incubate.optimizer.RecomputeOptimizer):
        return optimizer, None, False
    return optimizer._optimizer, list(optimizer._checkpoints or ()), optimizer.enable_offload
