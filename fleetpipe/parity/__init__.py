"""Runs a pipeline and its single-device model side by side and says whether a bit differs.

:func:`begin` is the function, ``fleetpipe parity SCRIPT`` (``command``) the command for a training
script that stays as it is. Both make a ``session``, which compares one step after another:

1. ``cutting`` cuts the batch a second time, and the micro-batches of both sides are compared;
2. the ``reference``, the model on one device, runs forward and backward on its own; on a GPU twice,
   as ``repetition`` measures what the device does not repeat;
3. the pipeline trains, while ``outputs`` keeps what layers return (of the reference too), ``edges``
   the gradients between stages, and the session looks where sums have another order;
4. in the place of the pipeline's optimizer ``stepping`` compares the gradients, then steps both
   sides, each at its learning rate; where a gradient differs, the reference has run once more
   before, to compare what arrived on the edges;
5. parameters and buffers are compared after, as is the loss.

``evaluation`` does the like for ``eval_batch`` and ``predict_batch``. ``differences`` says how far
two values are apart; the session puts those that all ranks found into one ``report``.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Layer, Nest, Optimizer, Scaler, Scheduler
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.parity.differences import Difference
from fleetpipe.parity.reference import LossOf, Reference, of_model, of_same_layers
from fleetpipe.parity.report import Report
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
    """Begins to compare a pipeline with its single-device model. Collective over the pipeline.

    Args:
        pipeline: What ``fleet.distributed_model`` returned.
        optimizer: What ``fleet.distributed_optimizer`` returned, before its first step.
        model: A single-device Layer with the same parameters in the same order; it takes the
            pipeline's weights. None: the pipeline's own list of layers.
        model_optimizer: The optimizer of ``model``. None: a twin of the pipeline's.
        loss_of: ``loss_of(inputs, label)`` gives the loss of ``model`` for a micro-batch. None: the
            pipeline's loss function of ``model(inputs)``.
        tolerance: Largest relative difference that passes. Default: none where bits can be equal.
            1e-6 where more than two replicas add up their gradients in another order than one
            device does; 1e-5 where ranks that hold slices of a layer or parts of sequences do so in
            every layer, where several stages use one weight, and where the model's graph makes the
            pipeline add up in another order, as the report then says.
        train_batch: ``train_batch(data, optimizer, lr_scheduler, scaler)`` trains the pipeline with
            that optimizer for a batch, and returns its loss: for a program that calls
            ``forward_backward_pipeline`` and steps the optimizer itself. None: the pipeline's own.

    Returns:
        The session; call its ``step(data)`` in the place of ``train_batch``, then read ``report``.

    Raises:
        ConfigError: The ranks run under settings that give different bits.
        UsageError: The loss is trained too, and no ``model`` was given.
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
