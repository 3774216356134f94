"""Numbers of bytes as people write them: ``2GiB``, ``500 MB``, 1048576."""

from __future__ import annotations

import math
import re

from fleetpipe.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{name: 1000**power for power, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{name: 1024**power for power, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
}


def read_bytes(value: object) -> float:
    """Reads a number of bytes from a number or from a text such as ``"2GiB"`` or ``"500MB"``.

    Raises:
        ConfigError: It is neither of them, or not above 0.
    """
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is not None and match[2] in _UNITS:
            number = float(match[1]) * _UNITS[match[2]]
    if not number > 0:
        raise ConfigError(
            "a cap of memory is a number of bytes above 0",
            got=repr(value),
            fix='write "2GiB", "500MB" or 2147483648',
        )
    return number


def show_bytes(size: float) -> str:
    """Writes bytes as ``1.25 GiB``, in the largest unit that gives at least one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Writes seconds as ``1.25 s`` or ``3.42 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
