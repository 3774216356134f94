"""What each schedule declares: which chunks it takes, its bubble and its peak.

The pages show these formulas, without the signs of products.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from fleetpipe.schedules.families.interleaved import balanced_groups

VEE = ("ZBV", "VHalf", "VMin", "DualPipeV")
SINGLE = ("Eager1F1B", "kFkB", "ZBH2")


#: The bubble by the costs of a chunk, from m = 2p on, with W not longer than F or I.
BUBBLES = {
    **dict.fromkeys(("FThenB", "1F1B", "Eager1F1B", "kFkB", "Interleaved1F1B"), "(p-1)*(F+B)"),
    "ZBH1": "(p-1)*(F+I-W)",
    "ZBH2": "(p-1)*(F+I-2*W)",
    "DualPipeV": "(p-1)*(FB+B-3*W)",
}
#: The most forwards of a chunk that rank r holds; g0 is the first of the groups, k of kFkB's.
PEAKS = {
    "FThenB": "m*v",
    "1F1B": "min(m, p-r)",
    "Eager1F1B": "min(m, 2*(p-r)-1)",
    "kFkB": "min(m, k*(p-r))",
    "Interleaved1F1B": "min(m*v, (v-1)*g0 + 2*(p-1-r) + 1)",
    "ZBH1": "min(m*v, (v-1)*g0 + p)",
    "ZBH2": "min(m, 2*p-1)",
    "ZBV": "min(2*m, 2*p, m+r+1)",
    "VHalf": "min(2*m, 2*floor((p+2)/2))",
    "VMin": "min(2*m, 2*floor((p+4)/3))",
    "DualPipeV": "min(2*m, 2*p+1, m+r+1)",
}
#: For F = I = W = 1, and FB = 3; ``costs`` is DualPipeV's bubble where F = I and FB >= F+B.
OF_ZBV = {"bubble": "2*max(0, 2*p-1-m)", "makespan": "max(6*m + p-1, 4*(m+p) - 2)"}
OF_DUALPIPEV = {
    "many": "2*(p-1) + 2*max(0, 2*p-m)",
    "few": "5*p-3-2*m",
    "costs": "(p-1)*(FB + B - 2*W - min(F, W))",
}
#: Peaks of w waves for m <= p.
OF_HANAYO = {"first rank": "(2*w-1)*m + 1", "last rank": "2*w*m"}


def takes(name: str, chunks: int) -> bool:
    """Whether a schedule exists with so many chunks on a rank."""
    return chunks == 2 if name in VEE else chunks == 1 or name not in SINGLE


def peaks(name: str, p: int, v: int, m: int) -> list[int]:
    """Returns for each rank the most forwards of one chunk that it may hold."""
    formula = PEAKS["Interleaved1F1B" if name == "1F1B" and v > 1 else name]
    first = balanced_groups(p, m)[0]
    return [int(value(formula, p=p, v=v, m=m, r=rank, g0=first, k=2)) for rank in range(p)]


def value(formula: str, **names: float) -> float:
    """Returns what a formula gives for p ranks, m micro-batches, v chunks on rank r, and so on."""
    return float(eval(formula, {"min": min, "max": max, "floor": floor}, names))


def bubble(name: str, p: int, v: int, m: int) -> tuple[int, bool]:
    """Returns the bubble, and whether it is exact or else the most that it may be."""
    few = max(0, p - m)
    formulas: dict[str, Callable[[], tuple[int, bool]]] = {
        "ZBH1": lambda: (p - 1 + (2 * v - 1) * few, few == 0 or v == 1),
        "ZBH2": lambda: (max(0, 2 * p - 1 - m), True),
        "ZBV": lambda: (int(value(OF_ZBV["bubble"], p=p, m=m)), True),
        "VHalf": lambda: v_half(p, m),
        "VMin": lambda: v_min(p, m),
        "DualPipeV": lambda: (int(value(OF_DUALPIPEV["many" if m > p else "few"], p=p, m=m)), True),
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
