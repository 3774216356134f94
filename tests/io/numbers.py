"""A dataset that says what was loaded, and what was drawn while it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle

from fleetpipe.io import sample_generator


class Numbers(paddle.io.Dataset):  # type: ignore[type-arg]
    """Its samples are their numbers, each with what it draws, from whom."""

    def __init__(self, samples: int = 20, worker_streams: bool = False) -> None:
        self.samples = samples
        self.worker_streams = worker_streams

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        drawn = [sample_generator().random()]
        if self.worker_streams:
            drawn += [random.random(), np.random.random(), paddle.rand([1]).item()]
        return np.int64(index), np.array(drawn)
