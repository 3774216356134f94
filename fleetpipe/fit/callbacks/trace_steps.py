"""``TraceSteps``: records what runs in a few steps, and draws it beside the prediction."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fleetpipe.engine.trace import Trace
from fleetpipe.errors import ConfigError, is_whole_number
from fleetpipe.fit.callbacks import rank_policy


class TraceSteps(rank_policy.Callback):
    """Records every action and transfer of some batches in the first replica.

    After the last of them the first rank writes ``trace.json`` for Perfetto and, with matplotlib,
    ``predicted.png`` and ``measured.png``, and prints the bubble rate.
    """

    def __init__(
        self, steps: Collection[int] = (10, 11), folder: str | os.PathLike[str] = "trace"
    ) -> None:
        """Configures which batches to record.

        Args:
            steps: Their numbers, counted from 1 through all epochs; the first of a run is slower
                than others.
            folder: The folder in which the first rank writes.

        Raises:
            ConfigError: ``steps`` is empty, or has one below 1.
        """
        super().__init__()
        if not steps or not all(map(is_whole_number, steps)):
            raise ConfigError(
                "steps are numbers of batches, from 1",
                got=repr(steps),
                fix="TraceSteps(steps=[10, 11])",
            )
        self._steps = set(steps)
        self._folder = Path(folder).absolute()
        self._trace: Trace | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the engine report to the trace. Collective over the pipeline."""
        job = self.model.pipeline.require_running()
        if self._trace is None and job.leads("pp"):
            schedule = self.model.pipeline.schedule
            ranks, group = job.connect(), job.group()
            self._trace = Trace(self._folder, schedule, ranks, group, progress=job.progress)
            self.model.pipeline.observe(self._trace)

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Starts to record if the batch is one of ``steps``."""
        if self._trace is not None and self.model.global_step + 1 in self._steps:
            self._trace.begin_step()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Ends the record of a batch of ``steps``, which is collective over the pipeline."""
        number = self.model.global_step
        if self._trace is None or number not in self._steps:
            return
        self._trace.end_step(number)
        if number == max(self._steps):
            summary = self._trace.write()
            if summary is not None:
                rank_policy.say(summary)
