"""Formats numbers, and chooses the ticks of an axis."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

_STEPS = (1, 2, 2.5, 5, 10)
_UNITS = ("B", "KB", "MB", "GB", "TB")


def short(value: float) -> str:
    """Formats a figure with four significant digits: 1,234  0.1235  1.235e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"


def align(values: Sequence[float]) -> list[str]:
    """Formats the figures of a column with equally many decimals, if that shows them all."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes or max(sizes) >= 1e9 or min(sizes) < max(sizes) / 1e4 or max(sizes) < 1e-3:
        return [short(value) for value in values]
    digits = max(0, 3 - math.floor(math.log10(max(sizes))))
    return [f"{value:,.{digits}f}" if math.isfinite(value) else str(value) for value in values]


def percent(value: float) -> str:
    """Formats a share of 1 as a percentage."""
    # Never -0.0%, which a sum of costs may come to.
    return f"{round(value, 3) + 0.0:.1%}"


def size(count: float) -> str:
    """Formats bytes in a fitting unit."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise ValueError(count)


def seconds(value: float) -> str:
    """Formats a duration in a fitting unit."""
    if 0 < value < 0.1:
        return f"{1000 * value:.3g} ms"
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def moment(value: float) -> str:
    """Formats a moment in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
    except (ValueError, OverflowError, OSError):
        return "at no known time"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round numbers between ``low`` and ``high``; at least one."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in _STEPS if power * one >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def labels(values: Sequence[float]) -> list[str]:
    """Formats the numbers of an axis with as many digits as distinguish them."""
    most = max(map(abs, values), default=0.0)
    if most and not 1e-3 <= most < 1e6:
        return [f"{value:.3g}" for value in values]
    step = min((b - a for a, b in itertools.pairwise(values)), default=most)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    # 0.25 has a digit more than its size says.
    digits += any(abs(round(value, digits) - value) > abs(step) / 100 for value in values)
    return [f"{value:,.{min(digits, 6)}f}" for value in values]
