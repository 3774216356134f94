"""The part of a model that training changes, as a checkpoint takes it."""

from __future__ import annotations

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.checkpoint.contents.layer_and_optimizer import NamedTensors, without_wrappers
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.mesh.parts import ModelParts, whole_name
from fleetpipe.paddle_api import paddle

_WITH_STATISTICS = (
    *(paddle.nn.BatchNorm, paddle.nn.BatchNorm1D, paddle.nn.BatchNorm2D, paddle.nn.BatchNorm3D),
    paddle.nn.SyncBatchNorm,
)


class TrainedPart:
    """Trained parameters and buffers of a model, in the place of a model in checkpoints.

    Frozen weights are not in it: a later job builds the model, loads these from where they came,
    and restores the rest. Running statistics count as trained, as a batch changes them.
    """

    def __init__(self, model: Layer) -> None:
        """Finds what is trained. Collective over the pipeline.

        Args:
            model: A pipeline, or a layer that is whole on this process.
        """
        self._model = without_wrappers(model)
        parts = self._whole_part()
        statistics = {
            id(tensor)
            for layer in self._model.sublayers(include_self=True)
            if isinstance(layer, _WITH_STATISTICS)
            for tensor in (layer._mean, layer._variance)
        }

        def changes(tensor: Tensor) -> bool:
            trained = not tensor.stop_gradient
            return trained or not hasattr(tensor, "trainable") or id(tensor) in statistics

        self._names = {name for name, held in parts.tensors.items() if changes(held.tensor)}
        of_rank = [whole_name(name, parts.tensors[name].tensor) for name in self._names]
        ranks = [of_rank]
        if isinstance(self._model, PipelineLayer):
            ranks = self._model.holders().all_gather(of_rank)
        self._outline = {name for names in ranks for name in names}

    def checkpoint_part(self) -> ModelParts:
        """Returns what this process holds of it."""
        parts = self._whole_part()
        return parts._replace(
            tensors={name: held for name, held in parts.tensors.items() if name in self._names},
            outline={name: s for name, s in parts.outline.items() if name in self._outline},
        )

    def _whole_part(self) -> ModelParts:
        if isinstance(self._model, PipelineLayer):
            return self._model.checkpoint_part()
        return NamedTensors.of_layer(self._model).parts
