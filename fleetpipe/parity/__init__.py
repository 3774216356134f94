"""Runs a pipeline and its single-device model side by side and says whether a bit differs.

:func:`begin` is the function, ``fleetpipe parity SCRIPT`` the command for a training script that
stays as it is.
"""

from __future__ import annotations

from typing import Any

from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.parity.differences import Difference
from fleetpipe.parity.reference import LossOf, Reference, of_model, of_same_layers
from fleetpipe.parity.report import Report
from fleetpipe.parity.session import Session

__all__ = ["Difference", "Reference", "Report", "Session", "begin"]


def begin(
    pipeline: PipelineParallel,
    optimizer: PipelineOptimizer,
    model: Any = None,
    model_optimizer: Any = None,
    loss_of: LossOf | None = None,
    tolerance: float | None = None,
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
            1e-6 where several replicas add up their gradients in another order than one device
            does, 1e-5 where ranks that hold slices of a layer do so in every layer, where several
            stages use one weight, and where the model's graph makes the pipeline add up in another
            order, as the report then says.

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
    session = Session(pipeline, reference, tolerance=tolerance)
    session.train_with(optimizer)
    return session
