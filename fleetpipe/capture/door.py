"""``fleetpipe.pipeline``: a plain model becomes a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe._paddle import user_strategy
from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.auto import Choice, agreed, chosen
from fleetpipe.capture.captured_pipeline import CapturedPipeline, Found
from fleetpipe.capture.capturing import Capturing
from fleetpipe.capture.costs import measured
from fleetpipe.capture.forms import Forms
from fleetpipe.capture.memory import initialize, without_memory
from fleetpipe.capture.proof import prove
from fleetpipe.capture.signature import example_of, signature_of
from fleetpipe.capture.split_spec import AUTO, SplitSpec, borders_of
from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.job.say_once import tell_once


def pipeline(
    model: Layer,
    example_inputs: Nest,
    loss_fn: Any = None,
    split_spec: SplitSpec = AUTO,
    num_stages: int | None = None,
    num_chunks: int = 1,
    no_split: Sequence[type] = (),
    verify: bool = True,
    *,
    recompute_interval: int = 0,
    memory_limit: float | None = None,
) -> CapturedPipeline:
    """Returns a plain model as a pipeline."""
    job = current_job()
    ranks = num_stages if job is None else job.degrees.pp
    rows = 2 if job is None else PipelineConfig.from_strategy(user_strategy()).micro_batch_size
    example = example_of(example_inputs, rows)
    captured = Capturing(model, example, no_split)
    stages = None if ranks is None else ranks * num_chunks
    choice = None
    if isinstance(split_spec, str) and split_spec == AUTO:
        choice = _chosen(captured, stages, memory_limit)
        borders = list(choice.borders)
    else:
        trace = captured(signature_of(example), True)
        borders = borders_of(split_spec, model, trace, stages)
    if stages is None:
        stages = len(borders) + 1
    if len(borders) + 1 != stages:
        raise ConfigError(
            f"split_spec cuts the model into {len(borders) + 1} stages",
            expected=f"{stages}: ranks of the pipeline times chunks",
            got=", ".join(map(str, borders)) or "no cut",
            fix="give one cut less than there are stages",
        )
    forms = Forms(captured, borders, example, recompute_interval)
    proof = prove(captured, forms, stages) if verify and _whole(model) else None
    chunks = None if num_chunks == 1 else num_chunks
    return CapturedPipeline(
        model, forms, stages // num_chunks, chunks, loss_fn, Found(choice, proof)
    )


def _whole(model: Layer) -> bool:
    """Whether this process may have all of a model; initializes it where it does."""
    job = current_job()
    lazy = without_memory(model)
    if lazy and job is not None and not job.local:
        tell_once(
            "verify=True compares nothing: the model was built under LazyGuard, and no rank has "
            "all of it; it is compared where one process plays all ranks",
        )
        return False
    initialize(model, lazy)
    return True


def _chosen(captured: Capturing, stages: int | None, memory_limit: float | None) -> Choice:
    """Returns the cut that is best by what the nodes cost. Collective over the job."""
    if stages is None:
        raise ConfigError(
            'split_spec="auto" needs the number of stages',
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    look = signature_of(captured.example)
    training, evaluation = captured(look, True), captured(look, False)
    costs = agreed(current_job(), lambda: measured(captured, training))
    return chosen(training, evaluation, costs, stages, memory_limit)
