"""Sums over the members of a group or over micro-batches: in the members' order, or by a tree.

A sum by a tree has the same bits whichever rank adds which part of it. Let 2^t be the largest power
of two that divides the number of values. Each of 2^t blocks of consecutive values is a running sum,
and the blocks are added in pairs, then the pairs in pairs, and so on::

    12 values    (((0+1)+2) + ((3+4)+5)) + (((6+7)+8) + ((9+10)+11))

If a power of two of ranks have equal numbers of the values, each rank has whole branches of the
tree. So each sums its own values by this rule, and the ranks' sums are added by this rule again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fleetpipe.errors import UsageError

#: The type of the values that are added, such as tensors.
Term = TypeVar("Term")


def copy_parts(parts: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """Returns a copy of the part for each member, since a tensor may change before it has left.

    Args:
        parts: The tensors that this member sends, by member.
        rank: This member.
        ranks: Number of members.

    Raises:
        UsageError: There is not one part for each member.
    """
    if len(parts) != ranks:
        raise UsageError(
            "a group exchanges one part for each of its members",
            where=f"member {rank}",
            expected=f"{ranks} tensors, by member",
            got=f"{len(parts)}",
            fix="split the tensor into as many parts as the group has members; a part may be empty",
        )
    # Paddle 2.6.2 clones no tensor without elements.
    return [part.detach() if 0 in part.shape else part.detach().clone() for part in parts]


def sum_parts(parts: Sequence[Any], rank: int) -> Any:
    """Returns the sum of the tensors that this member has got from all members, in their order.

    Args:
        parts: The tensors, by member.
        rank: This member, whose own tensor the others must be like.

    Raises:
        UsageError: The tensors differ in shape or dtype, or are bools.
    """
    kinds = [(str(part.dtype).rpartition(".")[2], tuple(part.shape)) for part in parts]
    dtype, shape = kinds[rank]
    differing = [member for member, kind in enumerate(kinds) if kind != kinds[rank]]
    if differing or dtype == "bool":
        other = differing[0] if differing else rank
        other_dtype, other_shape = kinds[other]
        raise UsageError(
            f"member {rank} cannot add what the members of the group have for it",
            expected=f"numbers of dtype {dtype} and shape {list(shape)}, as its own part"
            if dtype != "bool"
            else "numbers; bools can be exchanged by all_to_all",
            got=f"dtype {other_dtype} and shape {list(other_shape)} from member {other}",
            fix="split the tensors in the same way on every member, and cast bools",
        )
    return functools.reduce(add, parts)


def add(total: Any, part: Any) -> Any:
    """Returns the sum of two tensors of one dtype.

    Tensors of 16 bits are added in float32, for which CPUs have a kernel; the bits are the same.
    """
    dtype = total.dtype
    if str(dtype).rpartition(".")[2] not in ("float16", "bfloat16"):
        return total + part
    return (total.astype("float32") + part.astype("float32")).astype(dtype)


def count_blocks(values: int) -> int:
    """Returns the number of blocks of a tree: the largest power of two dividing ``values``."""
    return values & -values


class TreeSum(Generic[Term]):
    """Sums up values that come one after another, by a tree.

    At most one partial sum for each level of the tree is stored.

    Attributes:
        count: Number of values so far.
    """

    def __init__(self, values: int, add: Callable[[Term, Term], Term]) -> None:
        """Begins without a value.

        Args:
            values: Number of values to come.
            add: Returns the sum of two values; it may change the first, which is the earlier one.
        """
        self.count = 0
        self._block = values // count_blocks(values)
        self._add = add
        #: The sums of branches whose sister branch is not complete, the largest first.
        self._branches: list[Term] = []

    def add(self, value: Term) -> None:
        """Adds the next value."""
        blocks, within = divmod(self.count, self._block)
        self.count += 1
        if within:
            value = self._add(self._branches.pop(), value)
        if within == self._block - 1:
            # Each trailing 1 bit of the number of blocks is a branch that this block completes.
            while blocks & 1:
                value = self._add(self._branches.pop(), value)
                blocks >>= 1
        self._branches.append(value)

    def total(self) -> Term:
        """Returns the sum; all values must have come."""
        (total,) = self._branches
        return total


def tree(values: Sequence[Term], add: Callable[[Term, Term], Term]) -> Term:
    """Returns the sum of values by a tree.

    Args:
        values: The values, at least one.
        add: Returns the sum of two values; it may change the first, which is the earlier one.
    """
    block = len(values) // count_blocks(len(values))
    starts = range(0, len(values), block)
    sums = [functools.reduce(add, values[start : start + block]) for start in starts]
    while len(sums) > 1:
        sums = [add(left, right) for left, right in zip(sums[::2], sums[1::2])]
    return sums[0]
