"""``fleetpipe.pipeline``: a plain model becomes a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture import cuts
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.cuts import SplitSpec
from fleetpipe.capture.tracer import Unopened, traced
from fleetpipe.capture.value import Capture
from fleetpipe.job.job import current_job


def pipeline(
    model: Layer,
    example_inputs: Nest,
    loss_fn: Any = None,
    split_spec: SplitSpec = "auto",
    num_stages: int | None = None,
    num_chunks: int = 1,
    no_split: Sequence[type] = (),
    verify: bool = True,
) -> CapturedPipeline:
    """Returns a plain model as a pipeline."""
    capture = captured(model, example_inputs, no_split)
    borders = cuts.borders_of(split_spec)
    starts = {mode: cuts.starts(capture.of(mode), borders) for mode in (True, False)}
    job = current_job()
    stages = len(borders) + 1
    ranks = num_stages or (job.degrees.pp if job is not None else stages // num_chunks)
    chunks = None if num_chunks == 1 else num_chunks
    return CapturedPipeline(model, capture, starts, ranks, chunks, loss_fn)


def captured(model: Layer, example: Nest, no_split: Sequence[type] = ()) -> Capture:
    """Runs a model's forward in training and in evaluation, and returns what it does."""
    unopened = Unopened(tuple(no_split))
    mode = model.training
    try:
        model.train()
        training = traced(model, example, unopened)
        model.eval()
        return Capture(training, traced(model, example, unopened))
    finally:
        model.train() if mode else model.eval()
