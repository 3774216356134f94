"""The description of a forward program: its operations, the values between them, and stages.

Readers of both representations describe programs so; values are numbers. ``gpu:k`` in a
``device_guard`` means stage k on any device.
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
_FOREIGN = (os.path.dirname(paddle.__file__), _PACKAGE + os.sep)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_IMPORTLIB = "<frozen "


def draws(name: str) -> bool:
    """Whether an operation with this name draws random numbers."""
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
        tag: The stage of its guard; None without a guard, :data:`EVERYWHERE` for ``gpu:all``.
        floating: Whether it has no inputs and a fixed result: a parameter, fed data, a constant.
            Each stage that needs it has its own copy.
        line: The line of the user's script that created it; empty if unknown.
        inner: Tags of the operations in its blocks, if it is control flow.
        draws: Whether it draws random numbers.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    tag: int | None = None
    floating: bool = False
    line: str = ""
    inner: frozenset[int] = frozenset()
    draws: bool = False

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
        written: The values that an operation changes in place, by the operation's number.
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

    def outline(self) -> str:
        """Returns a text of the program, equal on all ranks that have built the same program."""
        lines = (
            f"{op.name} {list(op.reads)} {list(op.writes)} {op.tag} "
            f"{[self.names[value] for value in op.writes if value in self.persistable]}"
            for op in self.operations
        )
        return "\n".join(lines)


def dependencies(graph: Graph, numbers: Iterable[int], replicated: Collection[int]) -> list[int]:
    """Returns the replicated operations on which some operations depend, in order.

    Args:
        graph: The program.
        numbers: The operations.
        replicated: The operations of which each stage has a copy; others are ignored.
    """
    producers = graph.producers()
    replicas_needed: set[int] = set()
    waiting = list(numbers)
    while waiting:
        for value in graph.operations[waiting.pop()].reads:
            number = producers.get(value, -1)
            if number in replicated and number not in replicas_needed:
                replicas_needed.add(number)
                waiting.append(number)
    return sorted(replicas_needed)


def user_line(stack: Iterable[str]) -> str:
    """Returns file and line of the innermost frame of a stack outside of Paddle and fleetpipe."""
    line = ""
    for frame in stack:
        match = _FRAME.search(frame)
        if match and not match[1].startswith((*_FOREIGN, _IMPORTLIB)):
            line = f"{match[1]}, line {match[2]}"
    return line


def stage_of_device(device: str | None) -> int | None:
    """Returns k for ``gpu:k``, :data:`EVERYWHERE` for ``gpu:all``, else None."""
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
