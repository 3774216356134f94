"""The model that ``partition`` returns: a ``PipelineLayer`` with the plain model's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.compat.colossalai.pipeline.lazy_layers import described
from fleetpipe.compat.colossalai.pipeline.sequence import SequenceStep
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.paddle_api import paddle


class PipelinableModel(PipelineLayer):
    """The stages of a model that this process owns; its state has the keys of the plain model."""

    def __init__(
        self,
        model: Layer,
        steps: Sequence[SequenceStep],
        bounds: Sequence[int],
        ranks: int,
        chunks: int,
    ) -> None:
        """Builds the layers of this process's stages.

        Args:
            model: The whole model, made without memory.
            steps: Its layers in the order of their execution.
            bounds: The first layer of each stage, then the number of layers.
            ranks: Ranks of the pipeline.
            chunks: Chunks of each rank.
        """
        super().__init__(
            described(steps),
            num_stages=ranks,
            seg_method=list(bounds),
            num_virtual_pipeline_stages=chunks,
        )
        self.state.plain_names = self._names_in(model, steps)

    def state_dict(self, *args: Any, **named: Any) -> dict[str, Tensor]:
        """Returns this process's parameters and buffers by their names in the plain model.

        Arguments are those of ``nn.Layer.state_dict`` and have no effect.
        """
        state = self.own_state()
        names = self.state.plain_names
        return {plain: state[lasting] for plain, lasting in names.items() if lasting in state}

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Takes this process's parameters and buffers from a state dict of the plain model.

        Args:
            state_dict: That of the whole model, or of this rank.
            use_structured_name: As in ``nn.Layer.set_state_dict``.

        Returns:
            The keys of this process that are missing, and those that the model does not have.
        """
        if not use_structured_name:
            missing, unexpected = super().set_state_dict(dict(state_dict), use_structured_name)
            return missing, unexpected
        here = {id(tensor): name for name, tensor in paddle.nn.Layer.state_dict(self).items()}
        keys = {plain: here[id(tensor)] for plain, tensor in self.state_dict().items()}
        renamed = {keys[name]: value for name, value in state_dict.items() if name in keys}
        super().set_state_dict(renamed)
        unknown = [name for name in state_dict if name not in self.state.plain_names]
        return [name for name in keys if name not in state_dict], unknown

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns copies of all parameters and buffers of the model, with its keys, on every rank.

        Collective over the pipeline.
        """
        whole = super().full_state_dict()
        return {plain: whole[lasting] for plain, lasting in self.state.plain_names.items()}

    def _names_in(self, model: Layer, steps: Sequence[SequenceStep]) -> dict[str, str]:
        """Returns the lasting name of each parameter and buffer of the plain model."""
        tied = {index: shared for shared in self._tied for index in shared.indices}
        lasting: dict[int, str] = {}
        for index, step in enumerate(steps):
            for path, tensor in step.layer.state_dict().items():
                name = tied[index].names[path] if index in tied else f"{index}.layer.{path}"
                lasting.setdefault(id(tensor), name)
        return {plain: lasting[id(tensor)] for plain, tensor in model.state_dict().items()}
