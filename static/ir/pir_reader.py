"""Reads programs of Paddle's newer IR, PIR, for paddlepaddle 3.3.x.

It is imported only if Paddle has PIR.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from fleetpipe.aliases import Op, Optimizer, Program, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import gradient_clip, rate_variable, set_dtype
from fleetpipe.paddle_api.static import (
    dtype_name,
    is_pir,
    no_place,
    pir,
    pir_creation,
    pir_operations,
    static,
)
from fleetpipe.static.cut import PREFIX, Names, Split, Update
from fleetpipe.static.graph import EVERYWHERE, Declared, Graph, Operation
from fleetpipe.static.ir.backward import optimizer_variables_of
from fleetpipe.static.ir.pir_stage import PirStage
from fleetpipe.static.ir.pir_values import (
    DATA,
    PARAMETER,
    SET_PARAMETER,
    Versions,
    append_at_end,
    inner_operations,
    is_constant,
    is_random,
    line_of,
    location,
    name_of,
    operands,
    placeholder,
)

#: The attribute of an operation with its stage.
_STAGE = "chunk_id"
#: The prefix of an operation's attributes with the names of its results, for :func:`give_name`.
_NAME = "fleetpipe_name"
#: The chunk_id of ``device_guard("gpu:all")``; -1 is Paddle's default for no guard.
_ALL = 1 << 20


def stamp(stage: int | None) -> None:
    """Marks the operations that are created from now on with a stage; None for no stage."""
    pir.set_chunk_id(-1 if stage is None else _ALL if stage == EVERYWHERE else stage)
    program = static.default_main_program()
    if not is_pir(program):
        return  # with FLAGS_enable_pir_api=0, the guard itself marks operations of older Programs
    # Parameters need no stage, and Paddle cannot save a parameter with this attribute to a file.
    for op in program.global_block().ops:
        if op.name() == PARAMETER and op.has_attr(_STAGE):
            op.erase_attr(_STAGE)


def give_name(value: Variable) -> str:
    """Returns the name of a value; gives the value one if it has none."""
    op = value.get_defining_op()
    if op.name() in (PARAMETER, DATA):
        return name_of(op)
    if value.has_name:
        return str(value.name)
    attribute = f"{_NAME}.{value.index()}"
    if not op.has_attr(attribute):
        op.set_str_attr(attribute, paddle.utils.unique_name.generate(f"{PREFIX}{op.name()}"))
    return str(op.str_attr(attribute))


class PirReader:
    """Reads a PIR program; see ``cut.GraphReader``.

    A result of an operation is ``(operation, position)``: the index of the operation in the main
    block, or its id, and the position of the result in ``op.results()``.
    """

    def __init__(self, program: Program) -> None:
        """Reads the description of ``program``, which must have no backward."""
        self._program = program
        #: The result of each value, by number: the index of the operation, and the position.
        self._result_by_number: list[tuple[int, int]] = []
        self._number_by_result: dict[tuple[int, int], int] = {}
        self._versions = Versions()
        ops = program.global_block().ops
        self.graph = self._read_operations(ops)
        parameters = {name_of(op): op.result(0) for op in _parameter_operations(program)}
        self.unclipped = frozenset(n for n, p in parameters.items() if not p.need_clip)
        # Paddle puts each new parameter before the earlier ones.
        self.declared = {name: tuple(parameters[name].shape) for name in reversed(parameters)}
        fed = {name_of(op): op.result(0) for op in ops if op.name() == DATA}
        self.data = {n: Declared(tuple(v.shape), dtype_name(v)) for n, v in fed.items()}

    def number(self, target: Variable | str) -> int | None:
        """Returns the number of ``target``, a value or its name; None if the program lacks it."""
        if isinstance(target, str):
            return next((n for n, name in self.graph.names.items() if name == target), None)
        return _number_of(self._number_by_result, self._versions.current(target))

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> PirStage:
        """Builds a stage with its backward; see ``cut.GraphReader.stage``."""
        return PirStage(self._program, self._result_by_number, split, stage, (loss, weight))

    def _read_operations(self, ops: Sequence[Op]) -> Graph:
        """Returns the description of the main block's operations; numbers their results.

        It fills ``_result_by_number`` and ``_number_by_result``.
        """
        operations = []
        names: dict[int, str] = {}
        persistable: set[int] = set()
        differentiable: set[int] = set()
        rowwise: set[int] = set()
        written: dict[int, tuple[int, ...]] = {}
        for index, op in enumerate(ops):
            inputs = map(self._versions.current, operands(op))
            reads = tuple(dict.fromkeys(_existing_numbers(self._number_by_result, inputs)))
            writes = []
            for position, value in enumerate(op.results()):
                number = len(self._result_by_number)
                self._result_by_number.append((index, position))
                self._number_by_result[op.id(), position] = number
                writes.append(number)
                if op.name() in (PARAMETER, DATA):
                    names[number] = name_of(op)
                elif value.has_name:
                    names[number] = value.name
                elif op.has_attr(f"{_NAME}.{position}"):
                    names[number] = op.str_attr(f"{_NAME}.{position}")
                if op.name() == PARAMETER:
                    persistable.add(number)
                if not value.stop_gradient and value.is_dense_tensor_type():
                    differentiable.add(number)
                if value.is_dense_tensor_type() and value.shape[:1] == [-1]:
                    rowwise.add(number)
            changed = [v for v in self._versions.record(op) if self._versions.current(v).is_same(v)]
            if changed:
                written[index] = tuple(_existing_numbers(self._number_by_result, changed))
            operations.append(_describe_operation(op, reads, tuple(writes)))
        persistable_values, trainable = frozenset(persistable), frozenset(differentiable)
        return Graph(operations, names, persistable_values, trainable, frozenset(rowwise), written)

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Builds the optimizer step of the named parameters; see ``cut.GraphReader.update``."""
        if isinstance(gradient_clip(optimizer), paddle.nn.ClipGradByValue):
            raise ConfigError(
                "Paddle has no ClipGradByValue for PIR",
                fix="ClipGradByNorm or ClipGradByGlobalNorm; paddlepaddle 2.6.2 has it",
            )
        originals = {name_of(op): op.result(0) for op in _parameter_operations(self._program)}
        step, startup = self._program.clone(), static.Program()
        for op in reversed(step.global_block().ops):
            if op.name() != PARAMETER or name_of(op) not in parameters:
                op.erase()
        values = {name_of(op): op.result(0) for op in _parameter_operations(step)}
        pairs, accumulators = [], []
        with static.program_guard(step, startup):
            factor: Variable = _add_clip_factor(names.clip_factor) if clipped else None
            for name in parameters:
                parameter = values[name]
                for attribute in ("optimize_attr", "regularizer"):  # clone() forgets them
                    setattr(parameter, attribute, getattr(originals[name], attribute))
                grad = placeholder(names.accumulator(name), parameter)
                accumulators.append(grad)
                if name in clipped:
                    grad = grad * factor.astype(grad.dtype)
                pairs.append((parameter, grad))
            set_dtype(optimizer, pairs[0][0].dtype)
            optimizer.apply_gradients(pairs)
            for accumulator in accumulators:
                shape, dtype = accumulator.shape, accumulator.dtype
                pir_operations.full_(accumulator, shape, 0.0, dtype, no_place())
        fed = [names.clip_factor, *map(names.accumulator, parameters)]
        sources = [name_of(op) for op in step.global_block().ops if op.name() in (DATA, PARAMETER)]
        variables = sorted({*sources} - {*parameters, *fed})
        state = {
            name: optimizer_variables_of(optimizer, name, _variable_name) for name in parameters
        }
        rate = _variable_name(rate_variable(optimizer, step))
        return Update(step, startup, rate, tuple(variables), state)

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns a program that initializes the variables ``names`` as ``program`` does.

        It draws all random numbers of ``program``, so that each variable gets the same ones.
        """
        wanted = set(names)
        reduced = program.clone()
        for op in reversed(reduced.global_block().ops):
            if op.name() == SET_PARAMETER and name_of(op) not in wanted:
                value = op.operand_source(0)
                op.erase()
                value.persistable = False
            elif op.results() and not is_random(op) and all(v.use_empty() for v in op.results()):
                op.erase()
        return reduced


def _describe_operation(op: Op, reads: tuple[int, ...], writes: tuple[int, ...]) -> Operation:
    """Returns the description of an operation; ``reads`` and ``writes`` are numbers of values."""
    inner = list(inner_operations(op))
    return Operation(
        name=op.name(),
        reads=reads,
        writes=writes,
        tag=_stage_tag(op),
        floating=is_constant(op),
        line=line_of(op),
        inner=frozenset(
            tag
            for tag in (_stage_tag(inner_op) for inner_op in inner if inner_op.operands())
            if tag is not None
        ),
        is_random=any(map(is_random, (op, *inner))),
    )


def _existing_numbers(
    number_by_result: dict[tuple[int, int], int], values: Iterable[Variable]
) -> Iterator[int]:
    """Yields the numbers of values, except for values of inner blocks, which have none."""
    for value in values:
        number = _number_of(number_by_result, value)
        if number is not None:
            yield number


def _number_of(number_by_result: dict[tuple[int, int], int], value: Variable) -> int | None:
    """Returns the number of a value; None for a value of an inner block."""
    op = value.get_defining_op()
    return None if op is None else number_by_result.get(location(value))


def _stage_tag(op: Op) -> int | None:
    """Returns the stage with which :func:`stamp` has marked an operation; None without a mark."""
    tag = op.attrs().get(_STAGE, -1)
    if tag == _ALL:
        return EVERYWHERE
    return None if tag < 0 else int(tag)


def _parameter_operations(program: Program) -> list[Op]:
    """Returns the operations of a program whose results are its parameters."""
    return [op for op in program.global_block().ops if op.name() == PARAMETER]


def _add_clip_factor(name: str) -> Variable:
    """Adds a variable ``name`` to the current program: the factor that clips all gradients."""
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, [1], paddle.float32, no_place())
    value.persistable = True
    append_at_end(value.get_defining_op().get_parent_block())
    return value


def _variable_name(value: Variable) -> str:
    """Returns the name of the scope's variable behind a value."""
    return name_of(value.get_defining_op())
