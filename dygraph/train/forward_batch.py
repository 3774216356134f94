"""One batch that runs forward only: of any number of rows, which the first stage's owner knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.losses import Criterion, Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, ragged_weights
from fleetpipe.dygraph.batch.outputs import require_count
from fleetpipe.dygraph.batch.stage import Batch
from fleetpipe.dygraph.train.runtime import Runtime
from fleetpipe.paddle_api import paddle


@contextmanager
def forwarded(
    runtime: Runtime,
    batches: MicroBatches,
    functions: Sequence[Criterion] | None = None,
    labels: Nest = None,
) -> Iterator[Batch]:
    """Runs forwards; within it what they gave may be exchanged, still guarded. Collective.

    Args:
        runtime: What the batch runs on.
        batches: The micro-batches that this rank was given.
        functions: The loss functions to compute; None keeps the outputs.
        labels: The labels before they were cut, by whose rows uneven micro-batches count.

    Yields:
        The batch, with its losses or outputs where this process owns the last stage.

    Raises:
        ConfigError: A rank was not given what it needs, or another batch than the first stage.
        BoundaryError: A value cannot cross between stages.
        PeerFailed: Another rank left.
        PipelineTimeout: A message did not come within the limit.
        StateError: ``fleet.shutdown`` ended the job of the model.
    """
    runtime.require_running()
    runtime.require_data(batches, labelled=functions is not None)
    runtime.layers.begin(training=False)
    with runtime.job.guarded(lambda: "evaluating"):
        # A rank without data cannot know how many micro-batches will come.
        number = batches.inputs and len(batches.inputs)
        count: int = runtime.job.group().broadcast(number, runtime.first_owner)
        require_count(batches, count)
    losses = None
    if functions is not None:
        share = Fraction(1, 1 if runtime.config.loss_reduction == "sum" else count)
        ragged = ragged_weights(labels, runtime.cut()) if share.denominator > 1 else None
        weights = ragged or [share] * count
        weight_of = runtime.weight_of(functions, batches, weights)
        losses = Losses(functions, weights, weight_of=weight_of)
    batch = Batch(batches, losses)
    engine = runtime.evaluation.engine(count)
    with runtime.running(batch, engine, training=False), paddle.no_grad():
        engine.run({}, runtime.first_micro_batch)
        yield batch
