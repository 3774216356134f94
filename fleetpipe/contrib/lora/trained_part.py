"""The part of a model that training changes, as a checkpoint takes it."""

from __future__ import annotations

from fleetpipe.aliases import Layer
from fleetpipe.checkpoint.contents.layer_and_optimizer import NamedTensors, without_wrappers
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.mesh.parts import Held, ModelParts, whole_name


class TrainedPart:
    """Trained parameters and buffers of a model, in the place of a model in checkpoints.

    Frozen weights are not in it: a later job loads these from where they came, and restores the
    rest. Running statistics of batch norms count as trained, since a batch changes them.
    """

    def __init__(self, model: Layer) -> None:
        """Finds what is trained. Collective over the pipeline.

        Args:
            model: A pipeline, or a layer that is whole on this process.
        """
        self._model = without_wrappers(model)
        tensors = self._whole_part().tensors
        names = [whole_name(n, held.tensor) for n, held in tensors.items() if _changes(n, held)]
        self._names = {*names}
        if isinstance(self._model, PipelineLayer):
            self._names.update(*self._model.holders().all_gather(names))

    def checkpoint_part(self) -> ModelParts:
        """Returns what this process holds of it."""
        parts = self._whole_part()
        tensors = parts.tensors.items()
        return parts._replace(
            tensors={n: held for n, held in tensors if whole_name(n, held.tensor) in self._names},
            outline={name: shape for name, shape in parts.outline.items() if name in self._names},
        )

    def _whole_part(self) -> ModelParts:
        if isinstance(self._model, PipelineLayer):
            return self._model.checkpoint_part()
        return NamedTensors.of_layer(self._model).parts


def _changes(name: str, held: Held) -> bool:
    """Whether a step, or the forward of a batch norm, changes a tensor."""
    tensor, (*_, attribute) = held.tensor, name.split(".")
    untrained = hasattr(tensor, "trainable") and tensor.stop_gradient
    return not untrained or attribute in ("_mean", "_variance")
