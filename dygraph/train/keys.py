"""The random seeds of a model's batches."""

from __future__ import annotations

from contextlib import AbstractContextManager

from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.job.job import Job


class BatchKeys:
    """Draws the seeds of each batch of a model."""

    def __init__(self, layers: PipelineLayer, job: Job, mode: str) -> None:
        """Prepares to draw; no number is drawn yet."""
        self._layers, self._job, self._mode = layers, job, mode
        self._part = job.along("sep", "cp").rank
        self._keys_python = False

    def draw(self) -> Keys | None:
        """Draws the number of the next batch and returns its seeds; None under ``"fleet"``."""
        alone = self._job.everyone().ranks == 1 and not self._keys_python
        python = self._layers.owned_stages.draws_python or (False if alone else None)
        return random_keys.draw(self._mode, python, self._part)

    def peek(self) -> Keys | None:
        """Returns the seeds that the next training batch will have. Collective over mp."""
        with random_keys.random_states_kept():
            keys = self.draw()
        if keys is not None:
            keys.agree(self._job.model_parallel())
        return keys

    def keyed(self, keys: Keys | None) -> AbstractContextManager[None]:
        """While this context is open, layers draw under ``keys``. Collective over mp."""
        return random_keys.under_keys(keys, self._job.model_parallel())

    def key_python_draws(self) -> None:
        """Makes layers draw from Python's and NumPy's generators under keys from now on.

        A reference that runs beside each batch of one process needs it, to draw what the pipeline
        draws. On several ranks layers always do.
        """
        self._keys_python = True
