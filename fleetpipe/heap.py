"""Keeps the memory of freed tensors in the process, for those of the next micro-batch.

Paddle allocates a tensor on a CPU by the C library. glibc returns the end of its heap to the system
as soon as twice the largest freed block is free there, so a stage whose gradients come and go pays
for the same pages with each micro-batch: a page fault for every 4 KiB.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

#: Numbers of ``mallopt`` in glibc's ``malloc.h``: free bytes at the end of the heap that are kept,
#: and bytes from which a block is given to the process, and taken back, by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Weights are smaller, mostly; larger blocks would leave holes that no other one fits into.
MMAP_THRESHOLD = 16 * 2**20
TRIM_THRESHOLD = 512 * 2**20

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def prepare() -> bool:
    """Makes glibc keep up to ``TRIM_THRESHOLD`` free bytes at the end of the heap.

    The setting of a user stays: ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, or either
    in ``GLIBC_TUNABLES``. ``FLEETPIPE_HEAP=0`` turns this off.

    Returns:
        Whether it was set; never with another C library than glibc.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = "glibc.malloc.trim_threshold" in tunables or "glibc.malloc.mmap_thr" in tunables
    if os.environ.get("FLEETPIPE_HEAP", "1") == "0" or chosen:
        return False
    if any(name in os.environ for name in _VARIABLES):
        return False
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    options = {_M_MMAP_THRESHOLD: MMAP_THRESHOLD, _M_TRIM_THRESHOLD: TRIM_THRESHOLD}
    return all(library.mallopt(option, value) == 1 for option, value in options.items())
