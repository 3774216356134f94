"""A forward program as both readers describe it: operations, the values between them, their stages.

Nothing here knows Paddle: values are numbers, so that the rules of the cut are written once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The tag of ``device_guard("gpu:all")``: computed by every stage that needs it.
EVERYWHERE = -1

#: Parts of the names of operations that take random numbers, in either IR.
_RANDOM = (
    *("uniform", "gaussian", "randint", "randperm", "bernoulli", "dropout", "random", "normal"),
    *("multinomial", "binomial", "poisson", "exponential_", "standard_gamma", "dirichlet"),
    *("gumbel", "rrelu"),
)
#: Attributes of operations that have a dropout inside: recurrent ones, fused attention.
DROPOUTS = ("dropout_prob", "dropout_rate", "attn_dropout_rate")


def draws(name: str) -> bool:
    """Whether an operation of this name takes random numbers."""
    return any(word in name for word in _RANDOM)


#: What a micro-batch is fed: arrays by name.
Item = Mapping[str, Any]


class Declared(NamedTuple):
    """What ``paddle.static.data`` says of a feed: -1 is a dimension that may be any."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Operation:
    """One operation of the program's main block.

    Attributes:
        name: Paddle's name of it.
        reads: Numbers of the values it takes, those that its inner blocks take included.
        writes: Numbers of the values it makes.
        tag: The stage of its guard; None without a guard, :data:`EVERYWHERE` for ``gpu:all``.
        floating: It depends on nothing and always gives the same: a parameter, data that is fed,
            a constant. Every stage that needs it has its own.
        line: Where in the user's script it was made; empty where that is not known.
        inner: Tags of the operations in its blocks, which control flow has.
        draws: It takes random numbers.
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
    """The operations of a forward program in order, and which of their values are what.

    Attributes:
        operations: In program order; the index in this list is the operation's number.
        names: The values that have a name: data and parameters, and in the older Program all.
        persistable: Values that live from batch to batch: parameters, running statistics.
        differentiable: Values that a gradient may come back to.
        written: Persistable values by the number of the operation that writes them in place.
    """

    operations: Sequence[Operation]
    names: dict[int, str]
    persistable: frozenset[int]
    differentiable: frozenset[int]
    written: dict[int, tuple[int, ...]]

    def producers(self) -> dict[int, int]:
        """Returns the number of the operation that makes each value."""
        return {value: number for number, op in enumerate(self.operations) for value in op.writes}

    def outline(self) -> str:
        """Returns the program in a form that is the same on every rank that built the same."""
        lines = (
            f"{op.name} {list(op.reads)} {list(op.writes)} {op.tag} "
            f"{[self.names[value] for value in op.writes if value in self.persistable]}"
            for op in self.operations
        )
        return "\n".join(lines)


def needed(graph: Graph, numbers: Iterable[int], replicated: Collection[int]) -> list[int]:
    """Returns those of the replicated operations that the given ones take from, in order.

    Args:
        graph: The program.
        numbers: Operations.
        replicated: The operations that every stage has its own of; others are not looked at.
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
