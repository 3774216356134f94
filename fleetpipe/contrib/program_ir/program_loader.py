"""Handles ``DataLoader.from_generator(iterable=False)``, which puts ``read`` into a program.

Only the older Program has this loader of Paddle's. Its operation is no part of a stage: it runs on
its own, and its outputs are fed to the stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fleetpipe.aliases import Op, Program, Tensor
from fleetpipe.errors import StateError
from fleetpipe.paddle_api import static
from fleetpipe.static.graph import Item

_READ = "read"
_ITEMS, _STARTED = "_fleetpipe_items", "_fleetpipe_started"


def belongs_to_loader(op: Op) -> bool:
    """Whether an operation reads from a loader, or creates its reader."""
    return bool(op.type == _READ or (op.type.startswith("create_") and op.type.endswith("reader")))


def items_of(program: Program, run: Callable[..., Sequence[Tensor]]) -> Iterator[Item] | None:
    """Returns the micro-batches that a program reads by itself; None if it reads none."""
    if not hasattr(program, _ITEMS):
        setattr(program, _ITEMS, None if static.is_pir(program) else _reading(program))
    reading = getattr(program, _ITEMS)
    if reading is None:
        return None
    if not getattr(program, _STARTED, False):
        # Reading would wait for ever.
        raise StateError(
            "the program reads from a loader that was not started",
            fix="loader.start() before each epoch, loader.reset() after it; or feed by hand",
        )
    part, names = reading
    return _items(part, names, run)


def note_starts() -> list[Callable[[], None]]:
    """Makes Paddle's loaders note on their program whether they run; returns undo functions.

    A loader itself cannot be found from its program.
    """
    return [_note("start", True), _note("reset", False)]


def _note(method: str, started: bool) -> Callable[[], None]:
    original = getattr(static.GeneratorLoader, method)

    @functools.wraps(original)
    def noting(self: Any) -> None:
        original(self)
        setattr(static.program_fed_by(self), _STARTED, started)

    setattr(static.GeneratorLoader, method, noting)
    return functools.partial(setattr, static.GeneratorLoader, method, original)


def _reading(program: Program) -> tuple[Program, list[str]] | None:
    """Returns the part of a program that reads, and the names of its outputs; None without one."""
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


def _items(part: Program, names: list[str], run: Callable[..., Sequence[Tensor]]) -> Iterator[Item]:
    while True:
        try:
            values = run(part, fetch_list=names)
        except static.EOFException:
            return
        yield dict(zip(names, values))
