"""Finds reasons why the plain model cannot be trained beside its pipeline."""

from __future__ import annotations

from types import FunctionType

from fleetpipe.aliases import Layer
from fleetpipe.capture.running.captured_state import bytes_for_each_process, bytes_to_train
from fleetpipe.capture.running.variants import StagedCaptures
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.dygraph.backward.added_gradients import is_watched
from fleetpipe.dygraph.batch.micro_batches import ObservedBatch
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import forward_hooks

#: The kinds of objects that a deep copy duplicates.
_COPIED = (paddle.nn.Layer, paddle.Tensor, dict, list, set)


def find_obstacle(
    pipeline: PipelineParallel, captures: StagedCaptures, batch: ObservedBatch, first: bool
) -> str | None:
    """Returns why the plain model cannot be trained beside a batch; None if it can.

    Args:
        pipeline: The pipeline.
        captures: The runs of the plain model's forward.
        batch: The batch.
        first: Whether there is no copy of the model yet, so that memory for one is needed.
    """
    pipe = pipeline.layers
    if any(not p.stop_gradient for loss in pipe.loss_layers() for p in loss.parameters()):
        return "the loss is trained too, and both would add to its gradients"
    if any(map(is_watched, pipe.state.own_parameters().values())):
        return "a parameter has a hook on its gradient, which a copy of it has not"
    holder = _find_layer_keeping_objects(captures.capturer.model)
    if holder is not None:
        return f"a function of {holder} holds on to what a copy has anew"
    if pipeline.model_parallel.ranks > 1:
        return "its layers have shards of their weights here, and a copy is not whole"
    if pipeline.sequence.ranks > 1:
        return "each rank has a part of its sequences, and adds up in another order"
    if batch.loss_fn_idx:
        return f"backward starts from loss function {batch.loss_fn_idx}"
    if batch.scaler is not None and batch.scaler.is_enable():
        return "a GradScaler scales the gradients"
    needs = bytes_to_train(captures.capturer.model, captures.of_example(training=True).trace)
    free = bytes_for_each_process()
    if first and free is not None and needs > free:
        return (
            f"the model needs about {needs / 2**20:,.0f} MiB on each rank, "
            f"and this host has {free / 2**20:,.0f} MiB for each"
        )
    return None


def _find_layer_keeping_objects(model: Layer) -> str | None:
    """Returns the path of a layer with a function that refers to objects of the model, or None.

    A deep copy duplicates these objects, but shares the function, which would use the originals.
    """
    for path, layer in model.named_sublayers(include_self=True):
        attributes = [*vars(layer).values()]
        for hooks in forward_hooks(layer):
            attributes += hooks.values()
        for value in attributes:
            cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
            if any(isinstance(cell.cell_contents, _COPIED) for cell in cells):
                return path or type(model).__name__
    return None
