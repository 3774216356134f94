"""Calls an untouched model as the reference of a captured one: each node under its key."""

from __future__ import annotations

from typing import Any

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture._paddle import intercepted
from fleetpipe.capture.walk import NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph import random_keys
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import SoleGroup


class _Keyed(Walk):
    """Enters the key of each node."""

    def __init__(self, model: Layer, unopened: Unopened, keys: random_keys.Keys) -> None:
        super().__init__(model, unopened)
        self._keys = keys
        # The first entry of a list of layers takes the inputs.
        self._entry = 1

    def node(self, call: NodeCall) -> Any:
        """Calls it under its key."""
        self._keys.enter(self._entry)
        self._entry += 1
        return call.do()


def called(
    model: Layer,
    inputs: Nest,
    unopened: Unopened,
    keys: random_keys.Keys | None,
    micro_batch: GlobalMicroBatch,
) -> Nest:
    """Returns what a model returns, its random numbers drawn as the captured nodes draw theirs.

    Args:
        model: The untouched model.
        inputs: As for :func:`fleetpipe.pipeline`.
        unopened: Which layers are nodes as a whole.
        keys: The seeds of the batch; None to draw as the model does by itself.
        micro_batch: The number of the micro-batch.
    """
    args, named = arguments_of(inputs)
    if keys is None:
        return model(*args, **named)
    keys.micro_batch = micro_batch
    with random_keys.keyed(keys, SoleGroup()), intercepted(_Keyed(model, unopened, keys)):
        return model(*args, **named)
