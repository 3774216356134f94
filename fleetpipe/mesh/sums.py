"""The parts that members of a group exchange, and sums in the members' order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fleetpipe.errors import UsageError


def copies(parts: Sequence[Any], rank: int, ranks: int) -> list[Any]:
    """Copies the parts for each other member: a tensor may change before it has left.

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


def added_up(parts: Sequence[Any], rank: int) -> Any:
    """Sums the members' parts for the member ``rank``, in the members' order.

    Raises:
        UsageError: They differ in shape or dtype, or are bools.
    """
    kinds = [(str(part.dtype).rpartition(".")[2], tuple(part.shape)) for part in parts]
    differing = next((n for n, kind in enumerate(kinds) if kind != kinds[rank]), rank)
    if differing != rank or kinds[rank][0] == "bool":
        (dtype, shape), (other_dtype, other_shape) = kinds[rank], kinds[differing]
        raise UsageError(
            f"member {rank} cannot add what the members of the group have for it",
            expected=f"numbers of dtype {dtype} and shape {list(shape)}, as its own part"
            if dtype != "bool"
            else "numbers; bools can be exchanged by all_to_all",
            got=f"dtype {other_dtype} and shape {list(other_shape)} from member {differing}",
            fix="split the tensors in the same way on every member, and cast bools",
        )
    return functools.reduce(add, parts)


def add(total: Any, part: Any) -> Any:
    """Adds two tensors; those of 16 bits in float32, with the same bits: CPUs lack the kernel."""
    dtype = total.dtype
    if str(dtype).rpartition(".")[2] not in ("float16", "bfloat16"):
        return total + part
    return (total.astype("float32") + part.astype("float32")).astype(dtype)
