"""Runs the stages of a captured model, and the untouched model as their reference.

Start with ``CapturedStages``. A micro-batch runs by the run that was captured for its signature,
each node under its random key. ``fleetpipe.contrib.vocabulary`` has a vocabulary head in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lent
from fleetpipe.capture.running.replay import LOOK, SAMPLE
from fleetpipe.capture.running.variants import Form, Forms
from fleetpipe.capture.tracing.capturing import FirstBatch, switch
from fleetpipe.capture.tracing.signature import Signature, complete
from fleetpipe.capture.tracing.value import Capture, Node, NodeCall, Unopened, Walk, arguments_of
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.state.names import ModelWithParts
from fleetpipe.dygraph.state.single_model import copy_layers
from fleetpipe.engine.stage import Values
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import intercepting
from fleetpipe.paddle_api.layer import share_tables
from fleetpipe.schedules import Edge, Placement
from fleetpipe.schedules.action import GlobalMicroBatch

_FIRST = GlobalMicroBatch(0)


class CapturedStages:
    """Runs the stages, and returns the values on their edges: ``Borders`` of dygraph's stage."""

    def __init__(self, forms: Forms, training: Callable[[], bool]) -> None:
        """Stores the captured runs, and a function that returns whether the model trains."""
        self._forms = forms
        self._training = training

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return tuple(self._forms.example(training).crossing)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage in the current mode."""

        def run(value: Nest, micro_batch: GlobalMicroBatch | None) -> Nest:
            form, value = self.form(stage, value)
            form.renew(stage)
            output = form.runner.function(stage)(value, micro_batch)
            for mode in form.trace.switched:
                mode.put_back()
            return output

        return run

    def form(self, stage: int, value: Nest) -> tuple[Form, Nest]:
        """Returns the captured run for a stage's input, and the input of the run's first node."""
        forms = self._forms
        if stage:
            look = value.get(LOOK, forms.first)
            if SAMPLE in value:
                forms.capturing.samples.setdefault(look, FirstBatch(value[SAMPLE], set()))
        else:
            value = complete(value, forms.capturing.example)
            look = forms.capturing.look_of(value)
        return forms.of(look, self._training()), value

    def join(self, values: Values) -> Nest:
        """Returns the values of all edges into a stage, by name."""
        return {name: tensor for part in values.values() for name, tensor in part.items()}

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the values on each edge out of a stage, by name, with the batch's signature."""
        look: Signature = output[LOOK]
        first = {LOOK: look}
        sample = self._forms.capturing.samples.get(look)
        if sample is not None and stage not in sample.stages:
            sample.stages.add(stage)
            first[SAMPLE] = sample.text
        training = self._training()
        crossing = self._forms.of(look, training).crossing
        return {
            edge: {**first, **{name: output[name] for name in crossing.get(edge, ())}}
            for edge in self.edges(training)
            if edge.source == stage
        }


class Head(Protocol):
    """The replacement of a model's last layer; its parts are stages after those of the model.

    Attributes:
        description: The entry of the head in a list of layers.
        counted_names: Paddle's names of the layer's parameters, by their names in the model.
    """

    description: Any
    counted_names: Mapping[str, str]

    @property
    def parts(self) -> Sequence[Layer]:
        """The parts, in order."""

    @property
    def names(self) -> list[str]:
        """The names of :meth:`functions` in a profile and in a plan."""

    def functions(self) -> list[Callable[[Nest], Nest]]:
        """Returns the functions of the stages after those of the model."""

    def nodes(self, number: int) -> list[Node]:
        """Returns the nodes of the stage ``number`` after those of the model."""

    def require_last(self, *traces: Capture) -> None:
        """Raises an error if the model uses the layer's output."""

    def stages(
        self, forms: Forms, training: Callable[[], bool], runner: StageRunner, placement: Placement
    ) -> CapturedStages:
        """Returns the stages of the model, then those of the head, which ``runner`` runs."""


def loss_input(model: Layer, output: Nest) -> Nest:
    """Returns the input of a plain model's loss: its output, deferred if it has a head."""
    heads: list[Any] = [one for one in model.sublayers() if hasattr(one, "defer_logits")]
    return heads[0].defer_logits(output) if heads else output


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
    """A copy of a plain model; under the keys of a batch it draws the nodes' random numbers."""

    def __init__(
        self, model: Layer, example: Nest, unopened: Unopened, shared: Iterable[Tensor] = ()
    ) -> None:
        """Copies a model; tensors without memory in this process are zeros in the copy.

        Args:
            model: The model.
            example: An example of its inputs; inputs that a batch lacks are taken from it.
            unopened: The layers that are single nodes.
            shared: Parameters whose copies share the memory of the model's parameters.
        """
        super().__init__()
        with lent(model.state_dict().values()):
            copied = copy_layers(model, [model], shared)
        # Not by Layer.__setattr__, which would put the model's name before all others.
        self.__dict__.update(_model=copied, _example=example, _unopened=unopened)
        # The tables are shared, since a forward may replace a buffer.
        share_tables(copied, self)

    @property
    def plain(self) -> Layer:
        """The copy of the plain model."""
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
            # In the static graph of jit.save the example would become a weight.
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
    """Calls a model under the random keys of its nodes, and returns its output.

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
