"""Reads programs of Paddle's newer IR, PIR, for paddlepaddle 3.3.x.

It is imported only if Paddle has PIR.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from fleetpipe.aliases import Op, Optimizer, Program, Variable
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import gradient_clip, rate_variable, set_dtype
from fleetpipe.paddle_api.static import is_pir, no_place, pir, pir_creation, pir_operations, static
from fleetpipe.static.cut import PREFIX, Names, Split, Update
from fleetpipe.static.graph import EVERYWHERE, Declared, Graph, Operation
from fleetpipe.static.ir.backward import kept_of
from fleetpipe.static.ir.pir_stage import PirStage
from fleetpipe.static.ir.pir_values import (
    DATA,
    PARAMETER,
    SET_PARAMETER,
    Versions,
    draws_of,
    inside,
    is_constant,
    line_of,
    name_of,
    operands,
    place,
    placeholder,
    to_end,
)

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
    """Returns the name of a value, after giving it one if it has none."""
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
    """Reads a PIR program."""

    def __init__(self, program: Program) -> None:
        """Describes ``program``, which must have no backward."""
        self._program = program
        self._places: list[tuple[int, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._versions = Versions()
        ops = program.global_block().ops
        self.graph = self._read(ops)
        parameters = {name_of(op): op.result(0) for op in _parameters(program)}
        self.unclipped = frozenset(n for n, p in parameters.items() if not p.need_clip)
        # Paddle puts each new parameter before the earlier ones.
        self.declared = {name: tuple(parameters[name].shape) for name in reversed(parameters)}
        self.data = {name_of(op): _declaration(op.result(0)) for op in ops if op.name() == DATA}

    def number(self, target: Variable | str) -> int | None:
        """Returns the number of a value or of the value with a name; None if there is none."""
        if isinstance(target, str):
            return next((n for n, name in self.graph.names.items() if name == target), None)
        return _find(self._numbers, self._versions.now(target))

    def stage(self, split: Split, stage: int, loss: int, weight: float) -> PirStage:
        """Builds a stage with its backward; ``weight`` is the gradient of value ``loss``."""
        return PirStage(self._program, self._places, split, stage, (loss, weight))

    def _read(self, ops: Sequence[Op]) -> Graph:
        """Describes the operations of the program's main block, and numbers their values."""
        operations = []
        names: dict[int, str] = {}
        persistable: set[int] = set()
        differentiable: set[int] = set()
        rowwise: set[int] = set()
        written: dict[int, tuple[int, ...]] = {}
        for index, op in enumerate(ops):
            taken_now = map(self._versions.now, operands(op))
            reads = tuple(dict.fromkeys(_numbers(self._numbers, taken_now)))
            writes = []
            for position, value in enumerate(op.results()):
                number = len(self._places)
                self._places.append((index, position))
                self._numbers[op.id(), position] = number
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
            changed = [v for v in self._versions.add(op) if self._versions.now(v).is_same(v)]
            if changed:
                written[index] = tuple(_numbers(self._numbers, changed))
            operations.append(_describe(op, reads, tuple(writes)))
        lasting, trainable = frozenset(persistable), frozenset(differentiable)
        return Graph(operations, names, lasting, trainable, frozenset(rowwise), written)

    def update(
        self,
        names: Names,
        optimizer: Optimizer,
        parameters: Sequence[str],
        clipped: Collection[str],
    ) -> Update:
        """Builds the optimizer step for the named parameters."""
        if isinstance(gradient_clip(optimizer), paddle.nn.ClipGradByValue):
            raise ConfigError(
                "Paddle has no ClipGradByValue for PIR",
                fix="ClipGradByNorm or ClipGradByGlobalNorm; paddlepaddle 2.6.2 has it",
            )
        originals = {name_of(op): op.result(0) for op in _parameters(self._program)}
        step, startup = self._program.clone(), static.Program()
        for op in reversed(step.global_block().ops):
            if op.name() != PARAMETER or name_of(op) not in parameters:
                op.erase()
        values = {name_of(op): op.result(0) for op in _parameters(step)}
        pairs, sums = [], []
        with static.program_guard(step, startup):
            factor: Variable = _factor(names.clip_factor) if clipped else None
            for name in parameters:
                parameter = values[name]
                for attribute in ("optimize_attr", "regularizer"):  # clone() forgets them
                    setattr(parameter, attribute, getattr(originals[name], attribute))
                grad = placeholder(names.accumulator(name), parameter)
                sums.append(grad)
                if name in clipped:
                    grad = grad * factor.astype(grad.dtype)
                pairs.append((parameter, grad))
            set_dtype(optimizer, pairs[0][0].dtype)
            optimizer.apply_gradients(pairs)
            for sum_ in sums:
                pir_operations.full_(sum_, sum_.shape, 0.0, sum_.dtype, no_place())
        fed = [names.clip_factor, *map(names.accumulator, parameters)]
        sources = [name_of(op) for op in step.global_block().ops if op.name() in (DATA, PARAMETER)]
        variables = sorted({*sources} - {*parameters, *fed})
        kept = {name: kept_of(optimizer, name, _variable) for name in parameters}
        rate = _variable(rate_variable(optimizer, step))
        return Update(step, startup, rate, tuple(variables), kept)

    def startup(self, program: Program, names: Iterable[str]) -> Program:
        """Returns a program that initializes the named variables, with the same random numbers."""
        wanted = set(names)
        mine = program.clone()
        for op in reversed(mine.global_block().ops):
            if op.name() == SET_PARAMETER and name_of(op) not in wanted:
                value = op.operand_source(0)
                op.erase()
                value.persistable = False
            elif op.results() and not draws_of(op) and all(v.use_empty() for v in op.results()):
                op.erase()
        return mine


def _describe(op: Op, reads: tuple[int, ...], writes: tuple[int, ...]) -> Operation:
    """Describes an operation that takes and computes the values with some numbers."""
    tag = _tag(op)
    inner = frozenset(
        inner_tag for one in inside(op) if (inner_tag := _tag(one)) is not None and one.operands()
    )
    line, random = line_of(op), any(map(draws_of, (op, *inside(op))))
    return Operation(op.name(), reads, writes, tag, is_constant(op), line, inner, random)


def _numbers(numbers: dict[tuple[int, int], int], values: Iterable[Variable]) -> Iterator[int]:
    """Yields the numbers of values; values of inner blocks have none."""
    for value in values:
        number = _find(numbers, value)
        if number is not None:
            yield number


def _find(numbers: dict[tuple[int, int], int], value: Variable) -> int | None:
    """Returns the number of a value; None if the value has none."""
    op = value.get_defining_op()
    return None if op is None else numbers.get(place(value))


def _tag(op: Op) -> int | None:
    """Returns the stage with which :func:`stamp` has marked an operation."""
    tag = op.attrs().get(_STAGE, -1)
    return EVERYWHERE if tag == _ALL else None if tag < 0 else int(tag)


def _parameters(program: Program) -> list[Op]:
    return [op for op in program.global_block().ops if op.name() == PARAMETER]


def _factor(name: str) -> Variable:
    """Adds the variable of the factor of a clip to the current program."""
    pir.reset_insertion_point_to_start()
    value = pir_creation.data(name, [1], paddle.float32, no_place())
    value.persistable = True
    to_end(value.get_defining_op().get_parent_block())
    return value


def _variable(value: Variable) -> str:
    """Returns the name of the scope's variable behind a value."""
    return name_of(value.get_defining_op())


def _declaration(value: Variable) -> Declared:
    return Declared(tuple(value.shape), str(value.dtype).rpartition(".")[2])
