"""``fleetpipe.pipeline``: makes a pipeline of a plain model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from fleetpipe import log
from fleetpipe.capture.arguments import (
    ranks_for_stages,
    require_plain_model,
    require_stage_numbers,
    require_whole,
    resolve_no_split,
)
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.cutting.auto import require_one_stage, resolve_split_spec
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec
from fleetpipe.capture.proof import planned_schedule, prove
from fleetpipe.capture.repeatability import require_same_calls
from fleetpipe.capture.running.captured_state import initialize, return_memory, without_memory
from fleetpipe.capture.running.stages import Head
from fleetpipe.capture.running.variants import StagedCaptures
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.capture.tracing.signature import ROWS, fill_input_specs
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.model.arrangement import Arrangement
from fleetpipe.errors import ConfigError
from fleetpipe.extras import extra
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import user_strategy
from fleetpipe.paddle_types import Inputs, Layer
from fleetpipe.profiling import PipelinePlan

_log = log.logger(__name__)

#: The ``verify`` that proves a model, and also trains the plain model on the first batches.
FIRST = "first"

#: The number of first batches on which the plain model is trained too.
SHADOWED = 2


def pipeline(
    model: Layer,
    example_inputs: Inputs,
    loss_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    split_spec: SplitSpec | PipelinePlan = AUTO,
    num_stages: int | None = None,
    num_chunks: int = 1,
    no_split: Sequence[type | str] = (),
    verify: bool | str = FIRST,
    *,
    vocabulary_head: str | None = None,
    recompute_interval: int = 0,
    memory_cap: float | str | None = None,
    memory_limit: float | None = None,
    shape_inputs: Sequence[str | int] = (),
) -> CapturedPipeline:
    """Makes a pipeline of a plain model. Collective over the job, if there is one.

    The forward runs on the example and its calls are recorded; each stage makes its part of the
    same calls again. A batch with other shapes is captured anew when it comes.

    Args:
        model: Any layer. If several ranks run the pipeline, it keeps memory only for this rank's
            stages; built under ``paddle.LazyGuard`` it never has memory for all of them. In one
            process it stays as it is, and shares its parameters with the pipeline.
        example_inputs: One micro-batch: a Tensor, a tuple of arguments or a dict by name, which may
            contain None, bools, numbers, texts and nested containers; or ``InputSpec`` in place of
            tensors, with None for the number of rows. The same on every rank. Tensors that a batch
            leaves out are left out of the call; plain values are as in the example.
        loss_fn: ``loss_fn(output, label)``, as for ``PipelineLayer``; the output has the containers
            that the model returns.
        split_spec: ``"auto"``: the cut whose slowest stage is fastest, by the nodes' costs.
            ``["layer2", "layer3"]``: stages that begin with these sublayers. ``{"layer3":
            SplitPoint.END}``: before or after them. ``"llama.layers"``: the sublayers of this
            sublayer, shared evenly among the stages. ``{"layer1": 0, "layer2": 1}``: the stage of
            each; other sublayers are in the stage of the sublayer that runs before them. None:
            ``sublayer.pipeline_stage = k``, or calls of :func:`fleetpipe.pipe_split`. A plan of
            :func:`fleetpipe.plan`: its cut, chunks, schedule and recompute.
        num_stages: Ranks of the pipeline; in a job it is its ``pp_degree``, and may be left out.
        num_chunks: Chunks on each rank; 1 leaves it to the schedule.
        no_split: Classes of layers, or their names, that are never cut within.
        verify: True: before anything trains, the forward runs on other numbers and must make the
            same calls, and the untouched model and the stages train in this process and are
            compared: a few micro-batches under the schedule, a step, evaluation; ``proof`` of the
            result says what was compared. Under ``LazyGuard`` this needs one process with all
            stages. ``"first"``: the first two batches are trained beside the untouched model as
            well, with the real data, loss and optimizer, on every rank that has the memory for it
            (and under ``LazyGuard`` as above); a difference ends the job before the parameters
            change. False: neither of the two.
        vocabulary_head: The name of the ``nn.Linear`` whose logits are the model's only output:
            each rank gets a part of it, which replaces it in the model, and the loss is a
            :class:`fleetpipe.dygraph.VocabularyLoss`. ``verify`` compares the input of the
            ``nn.Linear``.
        recompute_interval: Number of nodes whose activations are dropped together after forward,
            and computed again in backward; 0 keeps all.
        memory_cap: With "auto", the bytes that a stage may have, as a number or as ``"2GiB"``.
        memory_limit: Former name of ``memory_cap``.
        shape_inputs: The keys, or indices in a tuple, of inputs of few whole numbers that the
            forward may read, such as the sizes of images. A batch with other numbers in these
            inputs is captured anew.

    Returns:
        A ``PipelineLayer`` for ``fleet.distributed_model``, whose parameters and buffers have the
        names of the plain model.

    Raises:
        CaptureError: The forward does something that a capture cannot repeat, the stages differ
            from the model, or two stages share a tensor that the forward writes into.
        ConfigError: An argument has an unknown name, or another number of stages.
        PartitionError: "auto" finds no cut.
        UsageError: ``model`` is no built layer, or a pipeline already.
    """
    if verify not in (True, False, FIRST):
        raise ConfigError(
            "verify is True, False or 'first'",
            got=repr(verify),
            fix="leave it out: the model is then proved before, and beside the first batches",
        )
    if memory_limit is not None:
        warnings.warn("memory_limit is memory_cap now", DeprecationWarning, stacklevel=2)
        memory_cap = memory_limit if memory_cap is None else memory_cap
    job = current_job()
    plan = split_spec if isinstance(split_spec, PipelinePlan) else None
    if plan is not None:
        num_stages, num_chunks = num_stages or plan.ranks, plan.chunks
    chunks = None if num_chunks == 1 else num_chunks
    if chunks is None and job is not None:
        num_chunks = Arrangement(job.degrees.pp, None, use_dualpipev=False).placement.chunks
    asked_ranks = require_stage_numbers(num_stages, num_chunks, job)
    rows = ROWS if job is None else PipelineConfig.from_strategy(user_strategy()).micro_batch_size
    no_classes = resolve_no_split(require_plain_model(model), no_split)
    head_in_place = _vocabulary_head_in_place(model, vocabulary_head, asked_ranks, chunks, plan)
    with paddle.enable_grad(), head_in_place as head:
        losses = loss_fn if isinstance(loss_fn, Sequence) else [loss_fn]
        example = fill_input_specs(example_inputs, rows)
        require_whole(example, shape_inputs)
        capturer = Capturer(model, example, no_classes, losses, shape_inputs)
        if verify:
            require_same_calls(capturer)
        names = () if head is None else head.names
        stages = None if asked_ranks is None else asked_ranks * num_chunks
        borders, choice = resolve_split_spec(capturer, split_spec, stages, memory_cap, names)
        ranks = ranks_for_stages(borders, asked_ranks, num_chunks)
        recomputed = () if plan is None else tuple(chain.from_iterable(plan.recompute))
        captures = StagedCaptures(capturer, borders, recompute_interval, recomputed)
        examples = [captures.of_example(training) for training in (True, False)]
        if head is not None:
            head.require_last(*(staged.trace for staged in examples))
        require_one_stage([(staged.trace, staged.starts) for staged in examples])
        captures.warn_left_out(captures.of_example(training=True))
        proof, schedule, whole = None, None, bool(verify) and _allocate_whole(model)
        if whole and job is not None:
            schedule = planned_schedule(ranks, chunks, plan, captures.stages)
        if whole:
            proof = prove(capturer, captures, schedule)
        shadowed = SHADOWED if whole and verify == FIRST and head is None else 0
        pipe = CapturedPipeline(
            model, captures, ranks, chunks, loss_fn, choice, proof, plan, shadowed, head
        )
        return_memory()
        return pipe


@contextmanager
def _vocabulary_head_in_place(
    model: Layer, path: str | None, ranks: int | None, chunks: int | None, plan: PipelinePlan | None
) -> Iterator[Head | None]:
    """Replaces the ``nn.Linear`` that gives a model's logits by the parts of a vocabulary head.

    An error within the context restores the ``nn.Linear``.

    Args:
        model: The model.
        path: The name of the ``nn.Linear``; None changes nothing, and yields None.
        ranks: Ranks of the pipeline, one for each part; None if they are unknown.
        chunks: Chunks on each rank; None takes the schedule's own number.
        plan: The plan of the pipeline; None without one.

    Yields:
        The head; None if ``path`` is.

    Raises:
        ConfigError: The number of ranks is unknown, or the layer cannot be replaced.
    """
    if path is None:
        yield None
        return
    if ranks is None:
        raise ConfigError(
            "vocabulary_head needs the number of ranks",
            fix="call fleet.init with a pp_degree first, or pass num_stages",
        )
    Arrangement(ranks, chunks, use_dualpipev=False, plan=plan, head=True)
    with extra("vocabulary.captured").in_place(model, path, ranks) as head:
        yield head


def _allocate_whole(model: Layer) -> bool:
    """Allocates the parameters of a model that was built under ``paddle.LazyGuard``.

    Returns:
        Whether this process has memory for the whole model now. If several processes run the
        pipeline of such a model, nothing is allocated here.
    """
    job = current_job()
    lazy = without_memory(model)
    if lazy and job is not None and not job.local:
        log.once(
            _log.warning,
            "nothing is compared with the plain model: it was built under LazyGuard, and no rank "
            "has all of it; it is compared where one process plays all ranks",
        )
        return False
    initialize(model, lazy)
    return True
