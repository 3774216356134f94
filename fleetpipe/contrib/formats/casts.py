"""Casts between float32, float16 and bfloat16, rounded to the nearest, ties to even.

They work on bits, as NumPy has no bfloat16. The results have the bits of ``paddle.cast``, except
that numbers between 1.6e-27 and 6.7e-24 become 0 in float16, for which it is wrong.
"""

from __future__ import annotations

import numpy as np

_CAST = {"float32": "u4", "float16": "u2", "bfloat16": "u2"}
#: What Paddle makes of every float32 that is no number.
_NO_NUMBER = 0x7FFF


def can_cast(source: str, target: str) -> bool:
    """Whether one of Paddle's dtypes can be cast to another."""
    return source in _CAST and target in _CAST


def cast(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Casts an array.

    Args:
        values: The bits of the numbers, as unsigned integers of the same size.
        source: Their dtype: float32, float16 or bfloat16.
        target: The new dtype.

    Returns:
        The bits of the new numbers.
    """
    if source == target:
        return values
    if source == "bfloat16":
        floats: np.ndarray = (values.astype("u4") << 16).view("f4")
    else:
        floats = values.view(source)
    if target == "bfloat16":
        numbers = floats.astype("f4", copy=False)
        whole = numbers.view("u4")
        rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
        return np.where(np.isnan(numbers), _NO_NUMBER, rounded).astype("u2")
    with np.errstate(over="ignore", under="ignore"):
        made: np.ndarray = floats.astype(target)
    return made.view(_CAST[target])
