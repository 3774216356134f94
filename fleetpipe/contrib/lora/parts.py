"""Parts of an adapted model, as checkpoints take them."""

from __future__ import annotations

from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.checkpoint.contents.layer_and_optimizer import NamedTensors, without_wrappers
from fleetpipe.contrib.lora.adapters import adapted_by
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.mesh.parts import LocalTensor, ModelParts, whole_name
from fleetpipe.representation import shows


@shows(model="_model.__class__.__name__")
class BasePart:
    """All of a model but its adapters, in the place of a model in checkpoints.

    So a model with adapters takes a checkpoint of the model without.
    """

    #: What the adapters among the tensors were made by; they are matched by name alone.
    _adapters = ""

    def __init__(self, model: Layer) -> None:
        """Takes a pipeline, or a layer that is whole on this process. Not collective."""
        self._model = without_wrappers(model)

    def checkpoint_part(self) -> ModelParts:
        """Returns what this process holds of it."""
        layer = self._model
        of = layer if isinstance(layer, PipelineLayer) else NamedTensors.of_layer(layer)
        parts: ModelParts = of.checkpoint_part()
        return parts._replace(
            adapters=self._adapters,
            tensors={
                name: local
                for name, local in parts.tensors.items()
                if self._has(whole_name(name, local.tensor))
            },
            shapes={name: shape for name, shape in parts.shapes.items() if self._has(name)},
        )

    def _has(self, name: str) -> bool:
        return {"lora_A", "lora_B"}.isdisjoint(name.split("."))


class TrainedPart(BasePart):
    """What training changes of a model, in the place of a model in checkpoints.

    These are trained parameters, and buffers and running statistics of batch norms, which a batch
    changes. A later job loads frozen weights from where they came, and restores the rest.
    """

    def __init__(self, model: Layer) -> None:
        """Finds what is trained, of a model as for BasePart. Collective over the pipeline."""
        self._names: set[str] | None = None
        super().__init__(model)
        tensors = self.checkpoint_part().tensors
        names = [whole_name(n, local.tensor) for n, local in tensors.items() if _changes(n, local)]
        here = names, adapted_by(self._model)
        pipeline = isinstance(self._model, PipelineLayer)
        parts = self._model.holders().all_gather(here) if pipeline else [here]
        self._names = {name for part, _ in parts for name in part}
        self._adapters = max(adapters for _, adapters in parts)

    def _has(self, name: str) -> bool:
        return self._names is None or name in self._names


def _changes(name: str, local: LocalTensor) -> bool:
    """Whether a step, or the forward of a batch norm, changes a tensor."""
    tensor: Any = local.tensor
    untrained = hasattr(tensor, "trainable") and tensor.stop_gradient
    return not untrained or name.split(".")[-1] in ("_mean", "_variance")
