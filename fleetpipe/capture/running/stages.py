"""Runs the stages of a captured model, and the untouched model as their reference.

Start with ``CapturedStages``. A micro-batch runs by the run that was captured for its signature,
each node under its random key. ``fleetpipe.contrib.vocabulary`` has a vocabulary head in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.captured_state import lend_zeros
from fleetpipe.capture.running.replay import FIRST_BATCH, SIGNATURE
from fleetpipe.capture.running.variants import StagedCapture, StagedCaptures
from fleetpipe.capture.tracing.capturing import FirstBatch, switch_mode
from fleetpipe.capture.tracing.signature import Signature, add_plain_values
from fleetpipe.capture.tracing.value import (
    Capture,
    Node,
    NodeCall,
    NodeFinder,
    Unopened,
    arguments_of,
)
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
    """Runs the stages of a captured model, and moves values between them over edges.

    It is the ``Borders`` of a ``DygraphStage``, which calls :meth:`join` before a stage's forward
    and :meth:`split` after it.
    """

    def __init__(self, captures: StagedCaptures, training: Callable[[], bool]) -> None:
        """Stores the captured runs, and a function that returns whether the model trains."""
        self._captures = captures
        self._training = training

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return tuple(self._captures.of_example(training).crossing)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage, by the capture of its input."""

        def run(value: Nest, micro_batch: GlobalMicroBatch | None) -> Nest:
            staged, value = self.staged_capture(stage, value)
            staged.move_written_tensors(stage)
            output = staged.runner.function(stage)(value, micro_batch)
            for mode in staged.trace.switched:
                mode.put_back()
            return output

        return run

    def staged_capture(self, stage: int, value: Nest) -> tuple[StagedCapture, Nest]:
        """Returns the captured run for a stage's input, and the input of the run's first node.

        Args:
            stage: The number of the stage.
            value: The input of stage 0 as the batch has it; of a later stage a dict of values.
        """
        captures = self._captures
        if stage:
            signature = value.get(SIGNATURE, captures.example_signature)
            if FIRST_BATCH in value:
                captures.capturer.first_batches.setdefault(
                    signature, FirstBatch(value[FIRST_BATCH], set())
                )
        else:
            value = add_plain_values(value, captures.capturer.example)
            signature = captures.capturer.signature_for(value)
        return captures.for_batch(signature, self._training()), value

    def join(self, values: Values) -> Nest:
        """Returns the input of a stage: the values of all edges into it, by name."""
        return {name: value for on_edge in values.values() for name, value in on_edge.items()}

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the values on each edge out of a stage, by name, from the output of the stage.

        Each edge also carries the signature of the batch, and the first time its integers as text.
        """
        signature: Signature = output[SIGNATURE]
        on_every_edge = {SIGNATURE: signature}
        first_batch = self._captures.capturer.first_batches.get(signature)
        if first_batch is not None and stage not in first_batch.stages:
            first_batch.stages.add(stage)
            on_every_edge[FIRST_BATCH] = first_batch.text
        training = self._training()
        crossing = self._captures.for_batch(signature, training).crossing
        return {
            edge: {**on_every_edge, **{name: output[name] for name in crossing.get(edge, ())}}
            for edge in self.edges(training)
            if edge.source == stage
        }


class Head(Protocol):
    """A vocabulary head in parts, which replaces the ``nn.Linear`` that gives a model's logits.

    Its parts are stages after those of the model. ``fleetpipe.contrib.vocabulary`` implements it.

    Attributes:
        description: The head as an entry of a list of layers.
        counted_names: Paddle's names of the Linear's parameters, by their names in the model.
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
        """Returns the functions of the stages after those of the model: the parts, and the loss."""

    def nodes(self, number: int) -> list[Node]:
        """Returns the nodes of a stage after those of the model, of which the first is 0."""

    def require_last(self, *traces: Capture) -> None:
        """Raises an error if the model uses the logits itself in one of the captured runs."""

    def stages(
        self,
        captures: StagedCaptures,
        training: Callable[[], bool],
        runner: StageRunner,
        placement: Placement,
    ) -> CapturedStages:
        """Returns the stages of the model, then those of the head, which ``runner`` runs."""


def loss_input(model: Layer, output: Nest) -> Nest:
    """Returns the input of a plain model's loss: its output, or logits that its head defers."""
    heads: list[Any] = [layer for layer in model.sublayers() if hasattr(layer, "defer_logits")]
    return heads[0].defer_logits(output) if heads else output


class KeyedNodeFinder(NodeFinder):
    """Runs each node of the untouched model with the random numbers that the pipeline draws in it.

    A random key is the seed of the random numbers of one node in one micro-batch.
    """

    def __init__(self, model: Layer, unopened: Unopened, keys: random_keys.Keys | None) -> None:
        """Prepares one run of the model, with the arguments of :class:`NodeFinder` and its keys."""
        super().__init__(model, unopened)
        self._keys = keys
        # The first entry of a list of layers takes the inputs.
        self._entry = 1

    def node(self, call: NodeCall) -> Any:
        """Calls a node under its random key, if there are keys, and returns its output."""
        if self._keys is not None:
            self._keys.enter(self._entry)
        self._entry += 1
        return call.do()


class PlainCopy(ModelWithParts):
    """A copy of the plain model, which draws the same random numbers as its pipeline.

    It does so while random keys of a batch are set: they have a key for each node.
    """

    def __init__(
        self, model: Layer, example: Nest, unopened: Unopened, shared: Iterable[Tensor] = ()
    ) -> None:
        """Copies a model; tensors without memory in this process are zeros in the copy.

        Args:
            model: The model.
            example: An example of its inputs; inputs that a batch lacks are taken from it.
            unopened: Decides which layers are single nodes.
            shared: Parameters whose copies share the memory of the model's parameters.
        """
        super().__init__()
        with lend_zeros(model.state_dict().values()):
            copied = copy_layers(model, [model], shared)
        # Not by Layer.__setattr__, which would put the model's name before all others.
        self.__dict__.update(_model=copied, _example=example, _unopened=unopened)
        # The tables are shared, since a forward may replace a buffer.
        share_tables(copied, self)

    @property
    def plain(self) -> Layer:
        """The copy of the plain model."""
        return self._model

    def train(self, mode: bool = True) -> PlainCopy:
        """Switches the model to training, or to evaluation, as a pipeline does."""
        switch_mode(self._model, mode)
        self.training = mode
        return self

    def eval(self) -> PlainCopy:
        """Switches the model to evaluation as a pipeline does."""
        return self.train(False)

    def forward(self, inputs: Nest) -> Nest:
        """Calls the model, and returns the input of its loss."""
        keys = random_keys.current_keys()
        micro_batch = _FIRST if keys is None else keys.micro_batch
        if paddle.in_dynamic_mode():
            # In the static graph of jit.save the example would become a weight.
            inputs = add_plain_values(inputs, self._example)
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
        unopened: Decides which layers are single nodes.
        keys: The random keys of the batch; with None the model draws random numbers by itself.
        micro_batch: The number of the micro-batch, on which the keys depend.
    """
    args, named = arguments_of(inputs)
    if keys is None:
        return model(*args, **named)
    keys.micro_batch = micro_batch
    with (
        random_keys.under_keys(keys, SoleGroup()),
        intercepting(KeyedNodeFinder(model, unopened, keys)),
    ):
        return model(*args, **named)
