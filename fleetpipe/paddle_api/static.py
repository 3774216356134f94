"""Accesses static graph in both IRs: scopes, dense tensors, Paddle's executors, operations.

``paddle._pir_ops`` is in 3.x only. 2.6.2 calls ``DenseTensor`` ``LoDTensor``, and the type of an
ordinary variable ``LOD_TENSOR``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import paddle.distributed.io as _distributed_io
from paddle.base import core as _core
from paddle.base import framework as _framework
from paddle.base import reader as _reader
from paddle.static import io as _static_io

from fleetpipe.aliases import (
    Block,
    Op,
    Optimizer,
    Place,
    Program,
    Scope,
    ScopeTensor,
    Tensor,
    Variable,
)
from fleetpipe.paddle_api import paddle

# Paddle's modules with the names that their stubs hide.
_any_core: Any = _core
_any_framework: Any = _framework
#: ``paddle.static`` with all its names.
static: Any = paddle.static
#: The module with the functions of ``paddle.static`` that save.
static_io: Any = _static_io
_incubate: Any = paddle.incubate

#: The class of a tensor in a scope: 2.6.2 calls it otherwise.
DenseTensor: Any = getattr(_any_core, "DenseTensor", None) or _any_core.LoDTensor
Executor: Any = static.Executor
#: The exception at the end of a loader, also of Paddle's own.
EOFException: Any = _any_core.EOFException
#: PIR itself, and its functions that create operations, by their names.
pir: Any = _any_core.pir
pir_operations: Any = paddle._C_ops
pir_creation: Any = getattr(paddle, "_pir_ops", None)
_TYPES: Any = _any_core.VarDesc.VarType
#: Types of variables of the older Program: an ordinary one, and one with some rows of a tensor.
DENSE = getattr(_TYPES, "DENSE_TENSOR", None) or _TYPES.LOD_TENSOR
SELECTED_ROWS = _TYPES.SELECTED_ROWS
#: The class of an older Program.
OlderProgram: Any = _any_framework.Program
#: Modules of Paddle's, each with a function in it that saves or loads the state of a program.
WHOLE_PROGRAM_STATE: tuple[tuple[Any, str], ...] = (
    *(
        (place, name)
        for place in (static, static_io)
        for name in ("save_vars", "load_vars", "serialize_persistables", "deserialize_persistables")
    ),
    *((_distributed_io, name) for name in ("save_persistables", "load_persistables")),
)
#: Classes that add an average of the parameters to a program.
AVERAGES: tuple[Any, ...] = (static.ExponentialMovingAverage, _incubate.ModelAverage)
#: The class of ``DataLoader.from_generator(iterable=False)``, for the older Program only.
GeneratorLoader: Any = _reader.GeneratorLoader


def program_classes() -> list[Any]:
    """Returns the classes of programs of either IR that this Paddle has."""
    newer = getattr(pir, "Program", None)
    return [OlderProgram, newer] if hasattr(newer, "state_dict") else [OlderProgram]


def is_pir(program: Program) -> bool:
    """Returns whether a program is in Paddle's newer IR, PIR."""
    return not isinstance(program, _any_framework.Program)


def dtype_name(value: Variable) -> str:
    """Returns the name of the dtype of a program's value, such as ``float32``."""
    name = numpy_dtype_name(value)
    return "bfloat16" if name == "uint16" else name


def numpy_dtype_name(value: Variable) -> str:
    """Returns the dtype name of the arrays to feed for a value: ``uint16`` for bfloat16."""
    return str(paddle.base.data_feeder.convert_dtype(value.dtype))


def tensor_of(scope: Scope, name: str) -> ScopeTensor:
    """Returns the dense tensor of a scope's variable, after creating a missing variable."""
    return scope.var(name).get_tensor()


def found_tensor(scope: Scope, name: str) -> ScopeTensor | None:
    """Returns the tensor of a scope's variable; None if the variable is missing or has no value."""
    variable = scope.find_var(name)
    tensor = None if variable is None else variable.get_tensor()
    return tensor if tensor is not None and tensor._is_initialized() else None


def lengths_of(tensor: Any) -> list[list[int]]:
    """Returns the sequence lengths in a ``LoDTensor`` of Paddle 2.6.2, by level; else []."""
    lengths = getattr(tensor, "recursive_sequence_lengths", list)
    return list(lengths())


def is_initialized(tensor: ScopeTensor) -> bool:
    """Returns whether a dense tensor has a value."""
    return bool(tensor._is_initialized())


def share_data(tensor: ScopeTensor, source: ScopeTensor) -> None:
    """Makes a dense tensor share the data of ``source``, without a copy."""
    tensor._share_data_with(source)


def free_memory(tensor: ScopeTensor) -> None:
    """Frees the memory of a dense tensor."""
    tensor._clear()


def overwrite(tensor: ScopeTensor, array: np.ndarray) -> None:
    """Copies the numbers of an array into a dense tensor, on the tensor's device."""
    place = tensor._place()
    if place.is_gpu_place():
        tensor.set(array, _any_core.CUDAPlace(place.gpu_device_id()))
    else:
        tensor.set(array, _any_core.CPUPlace())


def save_data(source: ScopeTensor) -> ScopeTensor | list[int]:
    """Returns a dense tensor that shares the data of ``source``; its shape if it has no data."""
    if not source._is_initialized():
        return source.shape()
    tensor = DenseTensor()
    tensor._share_data_with(source)
    return tensor


def restore_data(tensor: ScopeTensor, saved: ScopeTensor | list[int]) -> None:
    """Restores the data, or the shape, that :func:`save_data` returned."""
    if isinstance(saved, list):
        tensor._set_dims(saved)
    else:
        tensor._share_data_with(saved)


def dynamic_tensor(source: ScopeTensor) -> Tensor:
    """Returns a dynamic tensor with the data of a dense one; needs dynamic mode."""
    return _any_core.eager.Tensor(source)


def job_executor(program: Program, scope: Scope, place: Place) -> Any:
    """Returns an executor of one program, whose ``.run([], False)`` has little overhead.

    Args:
        program: A program of either IR; its persistable variables live in ``scope``.
        scope: A scope without a parent.
        place: The device.
    """
    description = program if is_pir(program) else program.desc
    plan = _any_core.Plan([_any_core.Job("default")], {"default": description})
    return _any_core.StandaloneExecutor(_native_place(place), plan, scope)


def _native_place(place: Place) -> Place:
    """Returns a device as the class of C++ that executors take."""
    native = _any_core.Place()
    native.set_place(place)
    return native


def swap_switch_device(
    replacement: Callable[[str | None], object],
) -> Callable[[str | None], object]:
    """Makes every ``device_guard`` call ``replacement(device)``; returns the earlier function."""
    original: Callable[[str | None], object] = _any_framework.switch_device
    _any_framework.switch_device = replacement
    return original


def switch_device(device: str | None) -> object:
    """Sets the device of later operations, as ``device_guard`` does; returns the earlier one."""
    return _any_framework.switch_device(device)


def operation_count(program: Program) -> int:
    """Returns the number of operations of a program."""
    return int(program.num_ops() if is_pir(program) else program.desc.block(0).op_size())


def program_within(program: Any) -> Any:
    """Returns the program inside a ``CompiledProgram``; any other program unchanged."""
    return program._program if isinstance(program, static.CompiledProgram) else program


def is_parsed_from(program: Program, description: bytes) -> bool:
    """Returns whether an older Program was parsed from ``description``, its serialized form."""
    return not is_pir(program) and bool(program.desc.serialize_to_string() == description)


def is_decorated(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer comes from ``paddle.static.amp.decorate``."""
    return isinstance(optimizer, static.amp.decorator.OptimizerWithMixedPrecision)


def has_step_of_its_own(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer, such as ``LookAhead``, does more than update parameters."""
    return not isinstance(optimizer, paddle.optimizer.Optimizer) or hasattr(
        optimizer, "inner_optimizer"
    )


def unwrap_recompute(optimizer: Optimizer) -> tuple[Optimizer, list[Variable | str] | None, bool]:
    """Returns the optimizer inside Paddle's ``RecomputeOptimizer``, and the options of recompute.

    Returns:
        The wrapped optimizer; the checkpoints of recompute; and whether these are stored on another
        device. For an optimizer of another class: itself, None and False.
    """
    if not isinstance(optimizer, _incubate.optimizer.RecomputeOptimizer):
        return optimizer, None, False
    return optimizer._optimizer, list(optimizer._checkpoints or ()), optimizer.enable_offload


def no_place() -> Any:
    """Returns the place by which PIR lets Paddle choose where a value is created."""
    return _any_core.Place()


def shape_only_slots(op: Op) -> set[str]:
    """Returns the input slots of which an operation of the older Program reads only shapes."""
    slots = {name: op.input(name) for name in op.input_names}
    outputs = {name: op.output(name) for name in op.output_names}
    attributes = {name: op.attr(name) for name in op.attr_names}
    return set(_any_core.infer_no_need_buffer_slots(op.type, slots, outputs, attributes))


def insert_assign(block: Block, position: int, source: Variable, target: Variable) -> None:
    """Inserts a copy of one variable into another at a position of a block."""
    block._insert_op(position, type="assign", inputs={"X": [source]}, outputs={"Out": [target]})


def rename_input(op: Op, name: str, other: str) -> None:
    """Makes an operation of the older Program read variable ``other`` instead of ``name``."""
    op._rename_input(name, other)


def rename_output(op: Op, name: str, other: str) -> None:
    """Makes an operation of the older Program write into variable ``other`` instead of ``name``."""
    op._rename_output(name, other)


def remove_operations(program: Program, indices: Iterable[int]) -> None:
    """Removes operations of an older Program's main block, by their indices."""
    for index in sorted(indices, reverse=True):
        program.global_block()._remove_op(index, sync=False)
    program._sync_with_cpp()


def remove_variables(program: Program, names: Iterable[str]) -> None:
    """Removes variables of an older Program's main block, by name."""
    for name in names:
        program.global_block()._remove_var(name, sync=False)
    program._sync_with_cpp()


def leave_device(op: Op) -> None:
    """Makes an operation of the older Program run on its executor's device."""
    op._set_attr("op_device", "")


def block_of(program: Program, op: Op) -> Block | None:
    """Returns the block inside a control-flow operation of the older Program, else None."""
    return program.block(op._block_attr_id("sub_block")) if op.has_attr("sub_block") else None


def program_fed_by(loader: Any) -> Program:
    """Returns the program that a :data:`GeneratorLoader` feeds."""
    return loader._feed_list[0].block.program
