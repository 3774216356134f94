"""Reads Paddle's older Program, the representation of paddlepaddle 2.6.2, into a graph.

In 3.3.x Paddle builds such programs with ``FLAGS_enable_pir_api=0``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fleetpipe.aliases import Block, Clip, Op, Optimizer, Program, Variable
from fleetpipe.contrib import program_ir
from fleetpipe.contrib.program_ir.program_stage import ProgramStage
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.optimizer import gradient_clip, rate_variable
from fleetpipe.paddle_api.static import (
    dtype_name,
    remove_operations,
    remove_variables,
    rename_output,
    static,
)
from fleetpipe.static.cut import Names, Split, Update
from fleetpipe.static.graph import Declared, Graph, Operation, stage_of_device
from fleetpipe.static.ir.backward import optimizer_variables_of

_CONSTANTS = ("fill_constant", "assign_value", "range", "eye", "linspace")


class ProgramReader:
    """Converts a Program of Paddle's older IR to a graph of operations and values.

    Each write of a variable is a new value, except for persistable variables. Data and parameters,
    which no operation makes, get operations of their own at the front of the graph.
    """

    def __init__(self, program: Program) -> None:
        """Reads ``program``, which must consist of a forward only."""
        self._program = program
        self._block = program.global_block()
        self._names: list[str] = []
        self._current: dict[str, int] = {}
        sources = _initial_variables(program)
        operations = [Operation("variable", (), (self._new_value(n),), None, True) for n in sources]
        written: dict[int, tuple[int, ...]] = {}
        for op in self._block.ops:
            if program_ir.belongs_to_loader(op):
                operations.append(
                    Operation(op.type, (), (), None, True, program_ir.user_line_of(op))
                )
                continue
            reads = tuple(
                self._current[n]
                for n in program_ir.variables_read(program, op)
                if n in self._current
            )
            outputs = list(dict.fromkeys(op.output_arg_names))
            persistable = [name for name in outputs if self._is_persistable(name)]
            if persistable:
                written[len(operations)] = tuple(self._current[name] for name in persistable)
            writes = tuple(self._new_value(name) for name in outputs if name not in persistable)
            operations.append(_operation_of(program, op, reads, writes))
        names = dict(enumerate(self._names))
        self._offset = len(sources)
        self.graph = Graph(
            operations,
            names,
            frozenset(n for n, name in names.items() if self._is_persistable(name)),
            frozenset(n for n, name in names.items() if self._is_differentiable(name)),
            frozenset(n for n, name in names.items() if self._has_row_axis(name)),
            written,
        )
        lasting = {name for name in self._names if self._is_persistable(name)}
        self.declared = {n: tuple(v.shape) for n, v in self._block.vars.items() if n in lasting}
        parameters = (self._block.var(n) for n in sources if self._is_persistable(n))
        self.unclipped = frozenset(p.name for p in parameters if not getattr(p, "need_clip", True))
        self.data = {
            name: Declared(tuple(variable.shape), dtype_name(variable))
            for name, variable in self._block.vars.items()
            if variable.is_data
        }

    def number(self, target: Variable | str) -> int | None:
        """Returns the number of the last value of a variable, given itself or by name."""
        return self._current.get(target if isinstance(target, str) else target.name)

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> ProgramStage:
        """Builds a stage with its backward.

        Args:
            split: The cut of the program.
            stage: The stage to build.
            loss: The number of the loss's value in the graph.
            weight: The gradient of the loss: the weight of a micro-batch.
        """
        return ProgramStage(self._program, self._names, self._offset, split, stage, (loss, weight))

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Builds the program of the optimizer's step.

        Args:
            names: The names of the pipeline's variables.
            optimizer: The optimizer.
            parameters: The names of the parameters that it trains.
            clipped: The parameters whose gradients are multiplied by the factor of a clip by global
                norm.

        Raises:
            ConfigError: A variable has a clip beside that of the optimizer.
        """
        _refuse_own_clips(self._block, gradient_clip(optimizer))
        step, startup = self._program.clone(), static.Program()
        block = step.global_block()
        remove_operations(step, range(len(block.ops)))
        remove_variables(step, [name for name in block.vars if name not in parameters])
        pairs = []
        with static.program_guard(step, startup):
            factor = None
            if clipped:
                factor = program_ir.create_variable(block, names.clip_factor, [1], "float32")
            for name in parameters:
                weight = block.var(name)
                weight.need_clip = self._block.var(name).need_clip  # clone() forgets it
                total = names.accumulator(name)
                pairs.append(
                    (weight, program_ir.create_variable(block, total, weight.shape, weight.dtype))
                )
            optimizer.apply_gradients(
                [(p, _multiply(block, g, factor) if p.name in clipped else g) for p, g in pairs]
            )
            for _, total in pairs:
                block.append_op(
                    type="fill_constant",
                    outputs={"Out": [total]},
                    attrs={"shape": list(total.shape), "dtype": total.dtype, "value": 0.0},
                )
        created = {name for op in startup.global_block().ops for name in op.output_arg_names}
        state = {name: optimizer_variables_of(optimizer, name, _scope_name) for name in parameters}
        rate = _scope_name(rate_variable(optimizer, step))
        return Update(step, startup, rate, tuple(sorted(created)), state)

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns the part of a startup program that initializes some variables.

        It draws all random numbers that the whole program draws, so that each variable gets the
        same ones; what is drawn for other variables goes into temporary ones.

        Args:
            program: The startup program.
            names: The variables to initialize.
        """
        wanted = set(names)
        part = program.clone()
        block = part.global_block()
        to_remove = []
        for index, op in enumerate(block.ops):
            outputs = op.output_arg_names
            if not wanted.isdisjoint(outputs) or program_ir.belongs_to_loader(op):
                continue
            if not program_ir.draws_random_numbers(op):
                to_remove.append(index)
                continue
            for name in outputs:
                like = block.var(name)
                temporary = block.create_var(
                    name=f"{name}.drawn", shape=like.shape, dtype=like.dtype, persistable=False
                )
                rename_output(op, name, temporary.name)
        remove_operations(part, to_remove)
        return part

    def _new_value(self, name: str) -> int:
        """Returns the number of a new value of a variable, which an operation writes."""
        self._current[name] = len(self._names)
        self._names.append(name)
        return self._current[name]

    def _has_row_axis(self, name: str) -> bool:
        """Returns whether the length of a variable's first axis is open, as for rows of a batch."""
        variable = self._block.vars.get(name)
        return (
            variable is not None and program_ir.is_tensor(variable) and variable.shape[:1] == (-1,)
        )

    def _is_persistable(self, name: str) -> bool:
        return bool(self._block.has_var(name) and self._block.var(name).persistable)

    def _is_differentiable(self, name: str) -> bool:
        """Returns whether a variable is a tensor of floats through which gradients flow."""
        if not self._block.has_var(name):
            return False
        variable = self._block.var(name)
        return (
            program_ir.is_tensor(variable)
            and not variable.stop_gradient
            and "float" in dtype_name(variable)
        )


def _scope_name(variable: Variable) -> str:
    """Returns the name that a variable of a program has in the scope."""
    return str(variable.name)


def _initial_variables(program: Program) -> list[str]:
    """Returns the names of the variables that exist before any operation: data, parameters."""
    block = program.global_block()
    written: set[str] = set()
    sources: dict[str, None] = {}
    for op in block.ops:
        if program_ir.belongs_to_loader(op):
            continue
        for name in (*program_ir.variables_read(program, op), *op.output_arg_names):
            if name in written or not block.has_var(name):
                continue
            if block.var(name).persistable or block.var(name).is_data:
                sources[name] = None
        written.update(op.output_arg_names)
    return list(sources)


def _refuse_own_clips(block: Block, clip: Clip) -> None:
    """Raises ConfigError if a variable has a clip beside the optimizer's ``clip``."""
    clips = ("error_clip",) if clip is not None else ("error_clip", "gradient_clip_attr")
    for name, variable in block.vars.items():
        for attribute in clips:
            if getattr(variable, attribute, None) is not None:
                raise ConfigError(
                    f"a static pipeline does not read the {attribute} of {name!r}",
                    cause="paddle.nn.clip.set_gradient_clip and _set_error_clip set it",
                    fix="clip by the optimizer: grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)",
                )


def _operation_of(
    program: Program, op: Op, reads: tuple[int, ...], writes: tuple[int, ...]
) -> Operation:
    """Describes an operation for the graph.

    Args:
        program: The program.
        op: The operation.
        reads: The numbers of the values that it reads.
        writes: The numbers of the values that it writes.
    """
    inner = list(program_ir.inner_operations(program, op))
    tags = (stage_of_device(each.attr("op_device")) for each in inner)
    return Operation(
        op.type,
        reads,
        writes,
        stage_of_device(op.attr("op_device")),
        op.type in _CONSTANTS and not reads and bool(writes),
        program_ir.user_line_of(op),
        frozenset(tag for tag in tags if tag is not None),
        any(map(program_ir.draws_random_numbers, (op, *inner))),
    )


def _multiply(block: Block, gradient: Variable, factor: Variable) -> Variable:
    """Appends a product to a block; returns the variable of the result."""
    product = program_ir.create_temporary(block, gradient)
    block.append_op(
        type="elementwise_mul",
        inputs={"X": [gradient], "Y": [factor]},
        outputs={"Out": [product]},
        attrs={"axis": -1},
    )
    return product
