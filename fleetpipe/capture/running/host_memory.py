"""Estimates whether a host has memory for another copy of a model, and frees memory."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import suppress
from pathlib import Path

from fleetpipe.aliases import Layer
from fleetpipe.capture.tracing.value import Capture, Like, like
from fleetpipe.job import meeting
from fleetpipe.paddle_api.device import device_kind, memory_limit, process_bytes

#: Of each parameter: its value, its gradient, two moments, and what a step is compared with.
_COPIES = 5


def return_memory() -> None:
    """Returns freed memory to the system: glibc by itself returns only the largest blocks."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def bytes_to_train(model: Layer, trace: Capture) -> int:
    """Returns about how many bytes a copy of a model needs to train one micro-batch.

    Args:
        model: The model, whose tensors need have no memory.
        trace: The captured forward in training; memory within its nodes is not counted.
    """
    state = sum(like(tensor).nbytes for tensor in model.state_dict().values())
    activations: list[Like] = [one for one in trace.likes if math.prod(one.shape)]
    return _COPIES * state + 2 * sum(one.nbytes for one in activations)


def bytes_for_each_process() -> int | None:
    """Returns the free memory for each process of this host; None if it is unknown."""
    if device_kind() == "gpu":
        return memory_limit() - process_bytes()
    free = _available()
    here = int(os.environ.get("PADDLE_LOCAL_SIZE", meeting.world_size()))
    return None if free is None else free // max(here, 1)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next((1024 * size for size in kilobytes), None)
