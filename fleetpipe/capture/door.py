"""``fleetpipe.pipeline``: a plain model becomes a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe._paddle import user_strategy
from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.captured_pipeline import CapturedPipeline, Found
from fleetpipe.capture.cutting.auto import Choice, agreed, chosen
from fleetpipe.capture.cutting.costs import measured
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec, borders_of
from fleetpipe.capture.proof import prove
from fleetpipe.capture.running.forms import Forms
from fleetpipe.capture.running.memory import initialize, without_memory
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.signature import example_of, signature_of
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
    """Makes a pipeline of a plain model. Collective over the job, where there is one.

    The forward is run on the example and its calls are noted; each stage makes its part of the same
    calls again. A batch with other shapes is captured anew when it comes.

    Args:
        model: Any layer. Where ranks share a pipeline it keeps the memory of this rank's stages
            alone: build it under ``paddle.LazyGuard`` and it is whole on no rank. In one process
            it stays as it is, and its parameters are those of the pipeline.
        example_inputs: One micro-batch: a Tensor, a tuple of arguments or a dict by name, in which
            None, bools, numbers, texts and nested containers may stand; or ``InputSpec`` in the
            place of tensors, with None for the number of rows. The same on every rank. Batches
            need to have the tensors; plain values are as in the example.
        loss_fn: ``loss_fn(output, label)``, as for ``PipelineLayer``; the output is what the model
            returns, whatever its containers.
        split_spec: ``"auto"``: the cut whose slowest stage is fastest by what the nodes take.
            ``["layer2", "layer3"]``: stages that begin with these sublayers.
            ``{"layer3": SplitPoint.END}``: before or after them. ``"llama.layers"``: the sublayers
            of that one, shared evenly. ``{"layer1": 0, "layer2": 1}``: the stage of each; the
            others go with what runs before them. None: ``sublayer.pipeline_stage = k``, or calls
            of :func:`fleetpipe.pipe_split`.
        num_stages: Ranks of the pipeline, without a job; in a job its ``pp_degree`` counts.
        num_chunks: Chunks on each rank; 1 leaves it to the schedule.
        no_split: Classes of layers that are never cut within.
        verify: Whether to run the untouched model and the stages on one batch, in this process,
            and to compare outputs, gradients and buffers in bits; ``proof`` of what is returned
            says what was found. Under ``LazyGuard`` only where one process has all stages.
        recompute_interval: Nodes of a stage whose activations are dropped together after forward,
            and computed again in backward; 0 keeps all.
        memory_limit: With "auto", the bytes that a stage may have.

    Returns:
        What ``fleet.distributed_model`` takes: a ``PipelineLayer`` whose parameters and buffers
        have the names of the plain model.

    Raises:
        CaptureError: The forward does what no node can be made of, the stages do not do what the
            model does, or two stages would keep the same running statistics.
        ConfigError: ``split_spec`` names what is not there, or another number of stages.
        PartitionError: "auto" finds no cut.
    """
    job = current_job()
    ranks = num_stages if job is None else job.degrees.pp
    rows = 2 if job is None else PipelineConfig.from_strategy(user_strategy()).micro_batch_size
    example = example_of(example_inputs, rows)
    capturing = Capturing(model, example, no_split)
    stages = None if ranks is None else ranks * num_chunks
    choice = None
    if isinstance(split_spec, str) and split_spec == AUTO:
        choice = _chosen(capturing, stages, memory_limit)
        borders = list(choice.borders)
    else:
        trace = capturing(signature_of(example), True)
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
    forms = Forms(capturing, borders, recompute_interval)
    proof = prove(capturing, forms, stages) if verify and _whole(model) else None
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


def _chosen(capturing: Capturing, stages: int | None, memory_limit: float | None) -> Choice:
    """Returns the cut that is best by what the nodes cost. Collective over the job."""
    if stages is None:
        raise ConfigError(
            'split_spec="auto" needs the number of stages',
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    look = signature_of(capturing.example)
    training, evaluation = capturing(look, True), capturing(look, False)
    costs = agreed(current_job(), lambda: measured(capturing, training))
    return chosen(training, evaluation, costs, stages, memory_limit)
