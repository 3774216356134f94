"""The random seeds of a model's batches."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.job.job import Job


class BatchKeys:
    """Draws the seeds of each batch of a model."""

    def __init__(self, layers: PipelineLayer, job: Job, mode: str) -> None:
        """Prepares to draw; no number is drawn yet."""
        self._layers, self._job, self._mode = layers, job, mode
        self._part = job.sequence().rank

    def draw(self, training: bool = True) -> Keys | None:
        """Returns the seeds of the next batch, which has begun; None under ``"fleet"``."""
        python = self._layers.owned_stages.draws_python
        keys = random_keys.draw(self._mode, python, self._part, training)
        if keys is not None:
            keys.parameters = self._parameters
        return keys

    def _parameters(self) -> dict[str, Tensor]:
        of_losses = enumerate(self._layers.loss_parameters())
        losses = {f"loss.{number}": parameter for number, parameter in of_losses}
        return {**losses, **self._layers.state.own_parameters()}

    def peek(self, training: bool = True) -> Keys | None:
        """Returns the seeds that the next training batch, or evaluation, will have.

        Collective over mp.
        """
        with random_keys.random_states_kept():
            keys = self.draw(training)
        if keys is not None:
            keys.agree(self._job.model_parallel())
        return keys

    def keyed(self, keys: Keys | None) -> AbstractContextManager[None]:
        """While this context is open, layers draw under ``keys``. Collective over mp."""
        return random_keys.under_keys(keys, self._job.model_parallel())
