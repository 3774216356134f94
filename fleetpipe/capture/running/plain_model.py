"""Calls an untouched model as the reference of a captured one, each node under its random key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.head import loss_input
from fleetpipe.capture.running.memory import lent
from fleetpipe.capture.tracing.capturing import switch
from fleetpipe.capture.tracing.signature import complete
from fleetpipe.capture.tracing.walk import NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.state.copies import copy_layers
from fleetpipe.dygraph.state.names import ModelWithParts
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import share_tables
from fleetpipe.paddle_api.operations import intercepting
from fleetpipe.schedules.action import GlobalMicroBatch

_FIRST = GlobalMicroBatch(0)


class Keyed(Walk):
    """Enters the random key of each node, if there are keys."""

    def __init__(self, model: Layer, unopened: Unopened, keys: random_keys.Keys | None) -> None:
        """Prepares one run of the model; see :class:`Walk`."""
        super().__init__(model, unopened)
        self._keys = keys
        # The first entry of a list of layers takes the inputs.
        self._entry = 1

    def node(self, call: NodeCall) -> Any:
        """Calls a node under its key."""
        if self._keys is not None:
            self._keys.enter(self._entry)
        self._entry += 1
        return call.do()


class Untouched(ModelWithParts):
    """A copy of a plain model, which runs as :func:`call_keyed` does under the keys of a batch."""

    def __init__(
        self, model: Layer, example: Nest, unopened: Unopened, shared: Iterable[Tensor] = ()
    ) -> None:
        """Copies a model, of which this process may have a part: missing tensors are zeros.

        Args:
            model: The model.
            example: An example of its inputs, whose plain values complete those of a batch.
            unopened: The layers that are single nodes.
            shared: Parameters whose copies have the memory of the model's own.
        """
        super().__init__()
        with lent(model.state_dict().values()):
            copied = copy_layers(model, [model], shared)
        # Around Layer.__setattr__, which would put the model's name before all others.
        self.__dict__.update(_model=copied, _example=example, _unopened=unopened)
        # A forward may put another tensor in the place of a buffer.
        share_tables(copied, self)

    @property
    def plain(self) -> Layer:
        """The copy itself."""
        return self._model

    def train(self, mode: bool = True) -> Untouched:
        """Switches the model to training as a pipeline does."""
        switch(self._model, mode)
        self.training = mode
        return self

    def eval(self) -> Untouched:
        """Switches the model to evaluation as a pipeline does."""
        return self.train(False)

    def forward(self, inputs: Nest) -> Nest:
        """Calls the model."""
        keys = random_keys.current()
        micro_batch = _FIRST if keys is None else keys.micro_batch
        if paddle.in_dynamic_mode():
            # In a static graph, as jit.save makes it, the example would be one of the weights.
            inputs = complete(inputs, self._example)
        output = call_keyed(self._model, inputs, self._unopened, keys, micro_batch)
        return loss_input(self._model, output)


def call_keyed(
    model: Layer,
    inputs: Nest,
    unopened: Unopened,
    keys: random_keys.Keys | None,
    micro_batch: GlobalMicroBatch,
) -> Nest:
    """Calls a model, whose random numbers are those of the captured nodes.

    Args:
        model: The untouched model.
        inputs: As for :func:`fleetpipe.pipeline`.
        unopened: The layers that are single nodes.
        keys: The random keys of the batch; None draws as the model does by itself.
        micro_batch: The number of the micro-batch.
    """
    args, named = arguments_of(inputs)
    if keys is None:
        return model(*args, **named)
    keys.micro_batch = micro_batch
    with random_keys.under_keys(keys, SoleGroup()), intercepting(Keyed(model, unopened, keys)):
        return model(*args, **named)
