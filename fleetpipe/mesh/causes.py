"""Likely causes, in a sentence, of ranks with other contents than their coordinates require.

And the axis along which these ranks are apart from the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

STREAMS = "dropout draws the same numbers on ranks along {}, which have different values there"
NORM = (
    "the norm is not that of all gradients: parts of other ranks are left out, or what ranks share "
    "is counted more than once"
)


def axis_between(
    places: Mapping[int, Mapping[str, int]], wrong: Collection[int], axes: Iterable[str]
) -> str:
    """Returns the first axis whose coordinate decides which ranks are wrong; "" if none does.

    Args:
        places: By rank, its coordinates on the axes; 0 where it says none.
        wrong: Some of these ranks.
        axes: The axes, likely ones first.
    """
    right = places.keys() - {*wrong}
    for axis in axes:
        sides = [{places[rank].get(axis, 0) for rank in side} for side in (wrong, right)]
        if all(sides) and sides[0].isdisjoint(sides[1]):
            return axis
    return ""


def of_unequal(axis: str, step: int) -> str:
    """Says why ranks that share a weight have different ones.

    Args:
        axis: The axis along which they differ; "" if unknown.
        step: The step at whose beginning they differ.
    """
    if step:
        return f"the weight was changed on some ranks after the step; they must agree along {axis}"
    return f"ranks begin with different values along {axis or 'all axes'}: a missing broadcast"
