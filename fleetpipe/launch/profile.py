"""``fleetpipe profile``: measures the model of a training script with its first batch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fleetpipe.dygraph import PipelineParallel
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles

_TRAINING = ("train_batch", "forward_backward_pipeline")


class _Measured(BaseException):
    """Ends a script, past its own ``except Exception``, when its model is measured."""


def run(options: argparse.Namespace) -> int:
    """Runs the script as far as its first batch, which is measured in the place of training.

    Returns:
        0 where a profile was written, 2 where the script never trains; of several ranks the exit
        code of the first that failed.
    """
    if script.to_be_launched(options):
        return script.launch(options, "profile", "--output", str(options.output))
    with _measuring(options.output), in_place_of_paddles():
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


@contextmanager
def _measuring(path: Path) -> Iterator[None]:
    """Within it a pipeline that is to train is measured, and the script ends."""

    def measure(pipeline: PipelineParallel, data: Any, *_: Any, **__: Any) -> NoReturn:
        profile = pipeline.profile(data, path)
        if pipeline.stage_id == 0:
            sys.stdout.write(f"{profile}\nwritten to {path}\n")
            sys.stdout.flush()
        raise _Measured

    originals = {name: getattr(PipelineParallel, name) for name in _TRAINING}
    for name in _TRAINING:
        setattr(PipelineParallel, name, measure)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(PipelineParallel, name, original)
