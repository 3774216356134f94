"""Runs a pipeline beside its single-device model and reports whether a bit differs.

A script calls :func:`begin`; ``fleetpipe parity SCRIPT`` (``parity_command``) runs a training
script unchanged. Both make a ``session``, which compares one step after another:

1. the batch is cut a second time, and the micro-batches of both sides are compared;
2. the ``reference``, the model on one device, gets the attributes that the script has changed on
   layers, and runs forward and backward (``beside``); on a GPU it runs twice, to measure how far
   two runs on the device differ;
3. the pipeline trains, while ``recorded_values`` records the outputs of layers, the reference's
   too, and the gradients between stages;
4. the optimizer that the pipeline calls compares the gradients, then steps both sides, each at its
   learning rate; if a gradient differs, the reference first runs once more, to compare the
   gradients on the edges;
5. the loss, the parameters and the buffers are compared after the step; parameters and buffers once
   more before the next step, since something else may have changed them.

``eval_batch`` and ``predict_batch`` are compared likewise. ``compare.differences`` measures how far
two values are apart; the session merges the differences of all ranks into one ``parity_report``.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Layer, Nest, Optimizer, Scaler, Scheduler
from fleetpipe.compare.differences import Difference
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.parity.parity_report import Report
from fleetpipe.parity.reference import LossOf, Reference, of_model, of_same_layers
from fleetpipe.parity.session import Calls, Session

#: ``train_batch(data, optimizer, lr_scheduler, scaler)`` returns the loss of the batch.
TrainBatch = Callable[[Nest, PipelineOptimizer, Scheduler, Scaler], Nest]

__all__ = ["Difference", "Reference", "Report", "Session", "begin"]


def begin(
    pipeline: PipelineParallel,
    optimizer: PipelineOptimizer,
    model: Layer | None = None,
    model_optimizer: Optimizer | None = None,
    loss_of: LossOf | None = None,
    tolerance: float | None = None,
    train_batch: TrainBatch | None = None,
) -> Session:
    """Starts to compare a pipeline with its single-device model. Collective over the pipeline.

    Args:
        pipeline: What ``fleet.distributed_model`` returned.
        optimizer: What ``fleet.distributed_optimizer`` returned, before its first step.
        model: A single-device Layer with the same parameters in the same order; it gets the
            pipeline's weights. None builds a copy of the pipeline's list of layers.
        model_optimizer: The optimizer of ``model``. None copies the pipeline's.
        loss_of: ``loss_of(inputs, label)`` returns the loss of ``model`` for a micro-batch. None
            applies the pipeline's loss function to ``model(inputs)``.
        tolerance: Largest relative difference that passes. Default: 0 if bits can be equal; 1e-6 if
            more than two replicas add up gradients in another order than one device; 1e-5 if ranks
            with shards of layers or parts of sequences do, if stages share a weight, or if the
            model's graph makes the pipeline do so, as the report then says.
        train_batch: ``train_batch(data, optimizer, lr_scheduler, scaler)`` trains the pipeline with
            that optimizer for a batch, and returns its loss. A program passes it if it calls
            ``forward_backward_pipeline`` and steps the optimizer itself. None calls the pipeline's
            own ``train_batch``.

    Returns:
        The session; call its ``step(data)`` in place of ``train_batch``, then read ``report``.

    Raises:
        ConfigError: The ranks run under settings that give different bits.
        UsageError: The loss has trained parameters, and no ``model`` was given.
        CheckpointError: ``model`` does not fit the pipeline.

    Example:
        >>> session = parity.begin(pipeline, optimizer)        # doctest: +SKIP
        >>> session.step([images, labels])                     # doctest: +SKIP
        >>> print(session.report.verdict())                    # doctest: +SKIP
    """
    if model is None:
        reference = of_same_layers(pipeline.layers)
    else:
        reference = of_model(pipeline.layers, model, loss_of, model_optimizer)
    calls = None
    if train_batch is not None:
        calls = Calls(train_batch, pipeline.eval_batch, pipeline.predict_batch)
    session = Session(pipeline, reference, calls, tolerance)
    session.train_with(optimizer)
    return session
