"""Describes and creates single operations and variables of the older Program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fleetpipe.aliases import Block, DType, Op, Program, Variable
from fleetpipe.paddle_api import static
from fleetpipe.static.graph import DROPOUTS, draws, user_line


def draws_of(op: Op) -> bool:
    """Whether an operation draws random numbers, also for a dropout that is part of it."""
    inner = next((op.attr(name) for name in DROPOUTS if op.has_attr(name)), 0.0)
    return draws(op.type) or inner > 0.0


def takes(program: Program, op: Op) -> list[tuple[str, bool]]:
    """Returns the variables that an operation takes, each with whether only its shape counts."""
    slots = {name: op.input(name) for name in op.input_names}
    unread = static.unread_slots(op)
    read = {name for slot, names in slots.items() if slot not in unread for name in names}
    shapes = {name for slot in unread for name in slots.get(slot, ())} - read
    return [(name, name in shapes) for name in reads_of(program, op)]


def line_of(op: Op) -> str:
    """Returns where in the user's script an operation was made."""
    return user_line(op.attr("op_callstack") or ())


def spare_statistics(block: Block, op: Op) -> None:
    """Makes a repeated operation update copies of the statistics that its first run updated."""
    for name in set(op.input_arg_names).intersection(op.output_arg_names):
        like = block.var(name)
        copy = block.create_var(name=f"{name}.again", shape=like.shape, dtype=like.dtype)
        position = block.ops.index(op)
        static.insert_assign(block, position, like, copy)
        static.rename_input(op, name, copy.name)
        static.rename_output(op, name, copy.name)


def create_variable(block: Block, name: str, shape: Sequence[int], dtype: DType) -> Variable:
    """Creates a variable that lives in the scope, or returns the block's one of that name."""
    return block.create_var(
        name=name, shape=list(shape), dtype=dtype, persistable=True, stop_gradient=True
    )


def temporary(block: Block, like: Variable) -> Variable:
    """Creates a variable with the shape and dtype of another.

    It gets a free name, because a clone in 2.6.2 counts unnamed variables from 0 again, and would
    choose a name that the program has.
    """
    names = (f"fleetpipe_temporary_{number}" for number in itertools.count())
    name = next(name for name in names if not block.has_var(name))
    return block.create_var(name=name, dtype=like.dtype, shape=like.shape)


def is_sparse(value: Variable) -> bool:
    """Whether a variable holds some rows of a tensor, as a sparse gradient does."""
    return bool(value.type == static.SELECTED_ROWS)


def is_tensor(value: Variable) -> bool:
    """Whether a variable holds one dense tensor."""
    return bool(value.type == static.DENSE)


def inside(program: Program, op: Op) -> Iterator[Op]:
    """Yields the operations in the block of an operation, at any depth."""
    block = static.block_of(program, op)
    for one in () if block is None else block.ops:
        yield one
        yield from inside(program, one)


def reads_of(program: Program, op: Op) -> list[str]:
    """Returns the variables that an operation and those in its block take, each once."""
    taken = [*op.input_arg_names]
    for one in inside(program, op):
        taken += one.input_arg_names
    return list(dict.fromkeys(name for name in taken if name != "@EMPTY@"))
