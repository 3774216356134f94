"""Exchanges for ``fleet.util`` and ``fleet.all_reduce``, over the connections of the job.

Fleet uses the Gloo of its role maker, which is not set up in collective mode: each rank would get
its own number back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fleetpipe.errors import UsageError, nearest
from fleetpipe.job.job import all_ranks, current_job
from fleetpipe.transport.base import Value

_MODES: Mapping[str, Callable[..., Any]] = {
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "mean": np.mean,
}


class Workers:
    """Replaces a role maker's Gloo; all ranks of the job are workers.

    Each method is collective over the job; ``comm_world`` is ignored.
    """

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        """Returns the sum, min, max or mean (``mode``) of all ranks' arrays, of one shape."""
        if mode not in _MODES:
            raise UsageError(
                "fleet adds numbers of all ranks, or takes the least, the largest or the mean",
                got=f"mode={mode!r}",
                fix=nearest(mode, tuple(_MODES)),
            )
        array = np.array(input)
        parts = _gather(array.tolist())
        return _MODES[mode]([np.array(part, array.dtype) for part in parts], axis=0)

    def all_gather(self, input: Value, comm_world: str = "worker") -> list[Value]:
        """Returns the numbers of all ranks, by rank."""
        return _gather(input)

    def barrier(self, comm_world: str = "worker") -> None:
        """Waits for all ranks."""
        _gather(None)


def _gather(value: Value) -> list[Value]:
    job = current_job()
    if job is None:
        return all_ranks().all_gather(value)

    def gather() -> list[Value]:
        job.require_others()
        return job.everyone().all_gather(value)

    return list(job.exchange("exchanging values of the script's", gather))
