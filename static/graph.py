"""Describes a forward program: its operations, the values between them, and their stages.

The readers of both of Paddle's representations return a :class:`Graph`, in which each operation
and each value has a number. ``gpu:k`` in a ``device_guard`` means stage k on any device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.paddle_api import paddle

#: The tag of operations under ``device_guard("gpu:all")``: every stage that needs one computes it.
EVERYWHERE = -1

#: Parts of the names of operations that draw random numbers, in both representations.
_RANDOM = (
    *("uniform", "gaussian", "randint", "randperm", "bernoulli", "dropout", "random", "normal"),
    *("multinomial", "binomial", "poisson", "exponential_", "standard_gamma", "dirichlet"),
    *("gumbel", "rrelu"),
)
#: Attributes of operations with a built-in dropout: recurrent operations, fused attention.
DROPOUTS = ("dropout_prob", "dropout_rate", "attn_dropout_rate")

#: The feed of a micro-batch: arrays by name.
Item = Mapping[str, Any]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Beginnings of the paths of files that are not the user's: Paddle's, fleetpipe's, importlib's.
_NOT_USERS = (os.path.dirname(paddle.__file__), _PACKAGE + os.sep, "<frozen ")
#: A frame in Paddle's text of a call stack.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def has_random_name(name: str) -> bool:
    """Returns whether an operation with Paddle's name ``name`` draws random numbers."""
    return any(word in name for word in _RANDOM)


class Declared(NamedTuple):
    """The declaration of a feed by ``paddle.static.data``; -1 is a dimension of any size."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Operation:
    """One operation of the program's main block.

    Attributes:
        name: Paddle's name of the operation.
        reads: Numbers of the values that it and its inner blocks take.
        writes: Numbers of the values that it computes.
        tag: The stage of its ``device_guard``, :data:`EVERYWHERE` for ``gpu:all``; None without.
        floating: Whether it is a parameter, fed data or a constant, which belongs to no stage: each
            stage that needs it has its own copy.
        line: The line of the user's script that created it; empty if unknown.
        inner: Tags of the operations in its blocks, if it is control flow.
        is_random: Whether it draws random numbers.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    tag: int | None = None
    floating: bool = False
    line: str = ""
    inner: frozenset[int] = frozenset()
    is_random: bool = False

    def __str__(self) -> str:
        return f"operation {self.name!r}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Graph:
    """The operations of a forward program in order, and the properties of their values.

    Attributes:
        operations: In program order; the index in this list is the operation's number.
        names: The names of values that have one: data and parameters, in the older Program all.
        persistable: Values that live from batch to batch: parameters, running statistics.
        differentiable: Values that may get a gradient.
        rowwise: Values whose first axis may have any length, as the axis of rows has.
        written: The values that each operation changes in place, by the operation's number.
    """

    operations: Sequence[Operation]
    names: dict[int, str]
    persistable: frozenset[int]
    differentiable: frozenset[int]
    rowwise: frozenset[int]
    written: dict[int, tuple[int, ...]]

    def producers(self) -> dict[int, int]:
        """Returns the number of the operation that computes each value."""
        return {value: number for number, op in enumerate(self.operations) for value in op.writes}

    def text(self) -> str:
        """Returns a line for each operation, equal on all ranks that built the same program."""
        lines = (
            f"{op.name} {list(op.reads)} {list(op.writes)} {op.tag} "
            f"{[self.names[value] for value in op.writes if value in self.persistable]}"
            for op in self.operations
        )
        return "\n".join(lines)


def dependencies(graph: Graph, numbers: Iterable[int], replicated: Collection[int]) -> list[int]:
    """Returns the operations of ``replicated`` on which ``numbers`` depend, ascending.

    Args:
        graph: The program.
        numbers: The numbers of the dependent operations.
        replicated: The operations of which each stage has a copy; others are not followed.
    """
    producers = graph.producers()
    needed: set[int] = set()
    unvisited = list(numbers)
    while unvisited:
        for value in graph.operations[unvisited.pop()].reads:
            number = producers.get(value, -1)
            if number in replicated and number not in needed:
                needed.add(number)
                unvisited.append(number)
    return sorted(needed)


def user_line(stack: Iterable[str]) -> str:
    """Returns ``"FILE, line N"`` of the innermost frame in the user's script; "" without one.

    Args:
        stack: The frames of a call as Paddle records them, outermost first.
    """
    line = ""
    for frame in stack:
        match = _FRAME.search(frame)
        if match is None:
            continue
        path, number = match.groups()
        if not path.startswith(_NOT_USERS):
            line = f"{path}, line {number}"
    return line


def stage_of_device(device: str | None) -> int | None:
    """Returns the stage that a ``device_guard`` names.

    Returns:
        k for ``gpu:k``, :data:`EVERYWHERE` for ``gpu:all``; None for ``cpu``, a device without a
        number, and no device.

    Raises:
        ConfigError: What stands behind the colon is no stage.
    """
    kind, _, index = (device or "").partition(":")
    if not kind or kind == "cpu" or not index:
        return None
    if index == "all":
        return EVERYWHERE
    if not index.isdigit():
        raise ConfigError(
            f"device_guard({device!r}) names no stage",
            expected="'gpu:0', 'gpu:1', .., or 'gpu:all'",
            fix="write the number of the stage behind the colon",
        )
    return int(index)


def stage_guard(stage: int) -> AbstractContextManager[object]:
    """Returns a context in which operations are built into a stage: ``device_guard("gpu:k")``."""
    fix = "number the stages 0, 1, 2, .. in the order of the network"
    number = require_whole("stage", stage, 0, fix=fix)
    guard: AbstractContextManager[object] = paddle.static.device_guard(f"gpu:{number}")
    return guard
