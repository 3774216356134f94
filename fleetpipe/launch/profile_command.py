"""``fleetpipe profile``: measures the model of a training script with its first batch."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fleetpipe.engine.observer import BatchObserver
from fleetpipe.launch import script

if TYPE_CHECKING:
    from fleetpipe.dygraph import PipelineParallel
    from fleetpipe.dygraph.batch.micro_batches import ObservedBatch


class _Measured(BaseException):
    """Ends a script whose model has been measured; an ``except Exception`` does not catch it."""


def run(options: argparse.Namespace) -> int:
    """Runs the script up to its first batch, and measures the model in place of training it.

    Returns:
        0 if a profile was written, 2 if the script never trains; with several ranks the exit code
        of the first that failed.
    """
    if script.to_be_launched(options):
        return script.launch(options, "profile", "--output", str(options.output))
    # Imported here because they import Paddle, which a process that starts ranks does not need.
    from fleetpipe.dygraph.train.observers import observing_all
    from fleetpipe.launch.substitution import in_place_of_paddles

    with observing_all(functools.partial(_Measuring, options.output)), in_place_of_paddles():
        try:
            script.execute(options.script, options.arguments)
        except _Measured:
            return 0
        except SystemExit as stop:
            if stop.code:
                raise
    sys.stderr.write(
        "fleetpipe profile: the script never called train_batch, so nothing was measured; give one "
        "that trains a pipeline, with the arguments that it trains with\n"
    )
    return 2


class _Measuring(BatchObserver):
    """Measures a pipeline in its first batch, and writes the profile."""

    def __init__(self, path: Path, pipeline: PipelineParallel) -> None:
        """Stores the file to write and the pipeline to measure."""
        self._path, self._pipeline = path, pipeline

    def begin(self, batch: ObservedBatch) -> NoReturn:
        """Measures the model in place of training the batch, and ends the script."""
        profile = self._pipeline.profile(batch.data, self._path)
        if self._pipeline.stage_id == 0:
            sys.stdout.write(f"{profile}\nwritten to {self._path}\n")
            sys.stdout.flush()
        raise _Measured
