"""Likely causes, in a sentence, of ranks with other contents than their places require."""

from __future__ import annotations

STREAMS = "dropout draws the same numbers on ranks along {}, which have different values there"
NORM = (
    "the norm is not that of all gradients: parts of other ranks are left out, or what ranks share "
    "is counted more than once"
)


def of_unequal(axis: str, step: int) -> str:
    """Says why ranks that share a weight have different ones.

    Args:
        axis: The axis along which they differ; "" if unknown.
        step: The step at whose beginning they differ.
    """
    if step:
        return f"the weight was changed on some ranks after the step; they must agree along {axis}"
    return f"ranks begin with different values along {axis or 'all axes'}: a missing broadcast"
