"""What each schedule declares: which chunks it takes, its peak and its bubble for F = I = W = 1."""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.schedules.families.interleaved import balanced_groups

VEE = ("ZBV", "VHalf", "VMin", "DualPipeV")
SINGLE = ("Eager1F1B", "kFkB", "ZBH2")


def takes(name: str, chunks: int) -> bool:
    """Whether a schedule exists with so many chunks on a rank."""
    return chunks == 2 if name in VEE else chunks == 1 or name not in SINGLE


def peaks(name: str, p: int, v: int, m: int) -> list[int]:
    """Returns for each rank the most forwards of one chunk that it may hold."""
    warm = (v - 1) * balanced_groups(p, m)[0]
    left = range(p - 1, -1, -1)
    most = {
        "FThenB": [m * v] * p,
        "1F1B": [warm + (2 if v > 1 else 1) * r + 1 for r in left],
        "Eager1F1B": [2 * r + 1 for r in left],
        "kFkB": [2 * (r + 1) for r in left],
        "Interleaved1F1B": [warm + 2 * r + 1 for r in left],
        "ZBH1": [warm + p] * p,
        "ZBH2": [2 * p - 1] * p,
        "ZBV": [2 * p] * p,
        "VHalf": [2 * ((p + 2) // 2)] * p,
        "VMin": [2 * ((p + 4) // 3)] * p,
        "DualPipeV": [2 * p + 1] * p,
    }[name]
    return [min(m * v, peak) for peak in most]


def bubble(name: str, p: int, v: int, m: int) -> tuple[int, bool]:
    """Returns the bubble, and whether it is exact or else the most that it may be."""
    few = max(0, p - m)
    formulas: dict[str, Callable[[], tuple[int, bool]]] = {
        "ZBH1": lambda: (p - 1 + (2 * v - 1) * few, few == 0 or v == 1),
        "ZBH2": lambda: (max(0, 2 * p - 1 - m), True),
        "ZBV": lambda: (2 * max(0, 2 * p - 1 - m), True),
        "VHalf": lambda: v_half(p, m),
        "VMin": lambda: v_min(p, m),
        "DualPipeV": lambda: dual_pipe_v(p, m),
    }
    whole = (3 * (p - 1) + 3 * (v - 1) * few, True)
    return formulas[name]() if name in formulas else whole


def v_half(p: int, m: int) -> tuple[int, bool]:
    full = 3 * p - 7 if p % 2 == 0 else 3 * p - 4
    return max(full, 1 if p == 2 else 0, 4 * p - 3 - 2 * m if p > 1 else 0), m >= p


def v_min(p: int, m: int) -> tuple[int, bool]:
    if p % 3 == 0:
        return max(4 * p - 7, 4 * p - 3 - 2 * m), m >= p
    return max(0, 4 * p - 5), True


def dual_pipe_v(p: int, m: int) -> tuple[int, bool]:
    return (5 * p - 3 - 2 * m if m <= p else 2 * (p - 1) + 2 * max(0, 2 * p - m)), True
