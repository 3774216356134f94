"""Reads programs in Paddle's older representation, Program. Start with ``program_reader.py``.

This file has functions of single operations and variables, and reads from Paddle's own loader,
``DataLoader.from_generator(iterable=False)``, which only the older Program has. The loader puts an
operation ``read`` into the program. This is no part of a stage: it runs by itself, and its outputs
are fed to the stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fleetpipe.aliases import Block, DType, Op, Program, Tensor, Variable
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import static
from fleetpipe.static.graph import DROPOUTS, Item, has_random_name, user_line

#: The type of the operation by which a program reads from a loader.
_READ = "read"
#: The attributes of a program: its part that reads from a loader, and whether the loader runs.
_READER, _STARTED = "_fleetpipe_items", "_fleetpipe_started"


def draws_random_numbers(op: Op) -> bool:
    """Returns whether an operation draws random numbers, by itself or in a fused dropout."""
    dropout = next((op.attr(name) for name in DROPOUTS if op.has_attr(name)), 0.0)
    return has_random_name(op.type) or dropout > 0.0


def reads_and_shapes(program: Program, op: Op) -> list[tuple[str, bool]]:
    """Returns the variables that an operation reads, each with whether only its shape is read."""
    slots = {name: op.input(name) for name in op.input_names}
    shape_slots = static.shape_only_slots(op)
    read = {name for slot, names in slots.items() if slot not in shape_slots for name in names}
    shape_only = {name for slot in shape_slots for name in slots.get(slot, ())} - read
    return [(name, name in shape_only) for name in variables_read(program, op)]


def user_line_of(op: Op) -> str:
    """Returns where in the user's script an operation was made."""
    return user_line(op.attr("op_callstack") or ())


def update_copies_of_statistics(block: Block, op: Op) -> None:
    """Lets an operation update copies of the variables that it would update in place.

    Recompute runs a batch norm a second time in a micro-batch, but the running statistics must
    change once.
    """
    for name in set(op.input_arg_names).intersection(op.output_arg_names):
        like = block.var(name)
        copy = block.create_var(name=f"{name}.again", shape=like.shape, dtype=like.dtype)
        position = block.ops.index(op)
        static.insert_assign(block, position, like, copy)
        static.rename_input(op, name, copy.name)
        static.rename_output(op, name, copy.name)


def create_variable(block: Block, name: str, shape: Sequence[int], dtype: DType) -> Variable:
    """Creates a persistable variable, or returns the block's variable of that name."""
    return block.create_var(
        name=name, shape=list(shape), dtype=dtype, persistable=True, stop_gradient=True
    )


def create_temporary(block: Block, like: Variable) -> Variable:
    """Creates a variable with another's shape and dtype, under a name that is not in use.

    In 2.6.2 a cloned program numbers unnamed variables from 0 again, and would reuse names.
    """
    names = (f"fleetpipe_temporary_{number}" for number in itertools.count())
    name = next(name for name in names if not block.has_var(name))
    return block.create_var(name=name, dtype=like.dtype, shape=like.shape)


def is_sparse(value: Variable) -> bool:
    """Returns whether a variable holds some rows of a tensor, as a sparse gradient does."""
    return bool(value.type == static.SELECTED_ROWS)


def is_tensor(value: Variable) -> bool:
    """Returns whether a variable holds one dense tensor."""
    return bool(value.type == static.DENSE)


def inner_operations(program: Program, op: Op) -> Iterator[Op]:
    """Yields the operations in the block of an operation, at any depth."""
    block = static.block_of(program, op)
    for inner in () if block is None else block.ops:
        yield inner
        yield from inner_operations(program, inner)


def variables_read(program: Program, op: Op) -> list[str]:
    """Returns the names of the variables that an operation and those in its block read."""
    names = [*op.input_arg_names]
    for inner in inner_operations(program, op):
        names += inner.input_arg_names
    return list(dict.fromkeys(name for name in names if name != "@EMPTY@"))


def belongs_to_loader(op: Op) -> bool:
    """Returns whether an operation reads from a loader, or creates its reader."""
    return bool(op.type == _READ or (op.type.startswith("create_") and op.type.endswith("reader")))


def items_from_loader(
    program: Program, run: Callable[..., Sequence[Tensor]]
) -> Iterator[Item] | None:
    """Returns the micro-batches that a program reads from a loader by itself; None without one.

    Args:
        program: The program.
        run: Runs a program, and returns the values of its ``fetch_list``.

    Raises:
        StateError: The loader was not started.
    """
    if not hasattr(program, _READER):
        setattr(program, _READER, None if static.is_pir(program) else _reader_of(program))
    reader = getattr(program, _READER)
    if reader is None:
        return None
    if not getattr(program, _STARTED, False):
        # A read would wait for ever.
        raise StateError(
            "the program reads from a loader that was not started",
            fix="loader.start() before each epoch, loader.reset() after it; or feed by hand",
        )
    part, names = reader
    return _read_items(part, names, run)


def note_starts() -> list[Callable[[], None]]:
    """Lets Paddle's loaders store on their program whether they have started.

    Returns:
        The functions that undo this.
    """
    return [_set_started_after("start", True), _set_started_after("reset", False)]


def _set_started_after(method: str, started: bool) -> Callable[[], None]:
    """Lets a method of Paddle's loaders store ``started``; returns a function that undoes this."""
    original = getattr(static.GeneratorLoader, method)

    @functools.wraps(original)
    def call_and_set_started(self: Any) -> None:
        original(self)
        setattr(static.program_fed_by(self), _STARTED, started)

    setattr(static.GeneratorLoader, method, call_and_set_started)
    return functools.partial(setattr, static.GeneratorLoader, method, original)


def _reader_of(program: Program) -> tuple[Program, list[str]] | None:
    """Returns a program of the operations that read from a loader, and the names that they write.

    Returns None if the program has no such operations.
    """
    ops = program.global_block().ops
    names = [name for op in ops if op.type == _READ for name in op.output_arg_names]
    if not names:
        return None
    part = program.clone()
    foreign = [index for index, op in enumerate(ops) if not belongs_to_loader(op)]
    static.remove_operations(part, foreign)
    for op in part.global_block().ops:
        static.leave_device(op)
    return part, names


def _read_items(
    part: Program, names: list[str], run: Callable[..., Sequence[Tensor]]
) -> Iterator[Item]:
    """Yields what a loader gives for each micro-batch, by name, until its epoch ends.

    Args:
        part: The program of the operations that read.
        names: The variables that ``part`` writes.
        run: Runs a program, and returns the values of its ``fetch_list``.
    """
    while True:
        try:
            values = run(part, fetch_list=names)
        except static.EOFException:
            return
        yield dict(zip(names, values))
