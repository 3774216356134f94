"""Computes the logits of a captured model in parts, in place of the model's last Linear.

``in_place`` replaces the Linear by ``HeadInParts``. The model then returns the input of the Linear,
and the parts are stages after those of the model, as with a ``VocabularyHead`` in a list of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.variants import StagedCaptures
from fleetpipe.capture.tracing.value import Capture, Node, Ref, Scope
from fleetpipe.contrib.vocabulary import (
    DeferredLogits,
    HeadBorders,
    VocabularyHead,
    VocabularyPart,
    vocabulary_loss,
)
from fleetpipe.dygraph.batch.units import Borders
from fleetpipe.dygraph.layers.entries import class_name
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.engine.stage import Values
from fleetpipe.errors import CaptureError, ConfigError, nearest
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import is_patched, sublayers_in
from fleetpipe.paddle_api.tensor import has_memory, initializer_of
from fleetpipe.schedules import Edge, Placement


class LinearHead(VocabularyHead):
    """A vocabulary head with weights [hidden, vocabulary], as a Linear has them."""

    axis = 1


class HeadedStages(CapturedStages):
    """The stages of a captured model, followed by the parts of its head and the loss."""

    def __init__(
        self,
        captures: StagedCaptures,
        training: Callable[[], bool],
        head: StageRunner,
        placement: Placement,
    ) -> None:
        """Stores the captured runs of the model, and the runner of the head's stages."""
        super().__init__(captures, training)
        self._head_runner, self._body_stages = head, placement.body
        self._chain: Borders = HeadBorders(placement)
        ends = [Edge(*ends) for ends in placement.chain()]
        self._edges = tuple(edge for edge in ends if edge.target >= self._body_stages)

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between all stages, in training or in evaluation."""
        return (*super().edges(training), *self._edges)

    def function(self, stage: int) -> Run:
        """Returns the function that runs a stage."""
        runs_model = stage < self._body_stages
        return super().function(stage) if runs_model else self._head_runner.function(stage)

    def join(self, values: Values) -> Nest:
        """Returns the input of a stage."""
        is_of_head = next(iter(values)).target >= self._body_stages
        return self._chain.join(values) if is_of_head else super().join(values)

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the values that leave a stage on each edge."""
        leads_to_head = stage >= self._body_stages - 1
        split = self._chain.split if leads_to_head else super().split
        return split(stage, output, labels)


class HeadInParts(paddle.nn.Layer):
    """Takes the place of a Linear in a model, and returns its input: the parts run as later stages.

    Attributes:
        stages: Makes the stages of the model, followed by those of the parts and the loss.
        path: The name of the Linear in the model.
        description: The equivalent head for a list of layers.
    """

    stages = HeadedStages

    def __init__(self, linear: Layer, path: str, ranks: int) -> None:
        """Copies the values of a Linear, part by part.

        Args:
            linear: The Linear, of weights [hidden, vocabulary].
            path: The name of the Linear in the model.
            ranks: Number of parts.
        """
        super().__init__()
        weight, bias = linear.weight, linear.bias
        self.path = path
        hidden, vocabulary = weight.shape
        of_bias = False if bias is None else _same_attributes(bias)
        self.description = LinearHead(
            hidden, vocabulary, _same_attributes(weight), bias_attr=of_bias
        )
        #: Paddle's names of the parameters of the Linear, by their names in the model.
        self.counted_names = {f"{path}.{n}": p.name for n, p in linear.named_parameters()}
        for number, described in enumerate(self.description.layers(ranks)[:-1]):
            part = _build_vocabulary_part(described, weight)
            first, last = part.rows
            if has_memory(weight):
                part.weight.set_value(weight[:, first:last])
            if bias is not None and has_memory(bias):
                part.bias.set_value(bias[first:last])
            self.add_sublayer(str(number), part)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns a copy of the hidden values."""
        return hidden.clone()

    @property
    def parts(self) -> tuple[VocabularyPart, ...]:
        """The parts, in order."""
        return tuple(part for part in self.sublayers() if isinstance(part, VocabularyPart))

    def functions(self) -> list[Callable[[Nest], Nest]]:
        """Returns the functions of the stages after those of the model: the parts, and the loss."""
        return [*self.parts, vocabulary_loss]

    @property
    def names(self) -> list[str]:
        """The names of :meth:`functions` in a profile and in a plan."""
        return list(map(class_name, self.description.layers(len(self.parts))))

    def nodes(self, number: int) -> list[Node]:
        """Returns the node of part ``number`` in a list; an empty list for the loss."""
        parts, scope = self.parts[number : number + 1], Scope(f"{self.path}.{number}", 0)
        return [Node(part, (), {}, (), (), (scope,), "") for part in parts]

    def defer_logits(self, hidden: Tensor) -> DeferredLogits:
        """Returns a plain model's output with this head, from which the loss computes logits."""
        return DeferredLogits(hidden, self.parts)

    def require_last(self, *traces: Capture) -> None:
        """Raises CaptureError if the model does more with its logits than return them.

        Args:
            traces: The captures of the model in training and in evaluation.
        """
        for trace in traces:
            last = trace.nodes[-1]
            calls = [node for node in trace.nodes if node.scopes[-1].path == self.path]
            if calls != [last] or trace.outputs != Ref(*last.outputs):
                raise CaptureError(
                    f"the model does something with the logits of {self.path!r}",
                    expected="a model that calls this layer once, and returns what it returns",
                    got=f"{len(calls)} calls; last {last.name}, {last.location}",
                    fix="do that in the loss function, or leave vocabulary_head out",
                )


def _build_vocabulary_part(description: Any, weight: Tensor) -> Any:
    """Builds the described part of a vocabulary, in the dtype of the weights of a Linear.

    The part has no memory if these weights have none.
    """
    if has_memory(weight):
        return description.build_layer().to(dtype=weight.dtype)
    default_dtype = paddle.get_default_dtype()
    dtype: Any = str(weight.dtype).removeprefix("paddle.")
    paddle.set_default_dtype(dtype)
    try:
        with paddle.LazyGuard():
            return description.build_layer()
    finally:
        paddle.set_default_dtype(default_dtype)


def _same_attributes(parameter: Tensor) -> Any:
    """Returns a ``ParamAttr`` by which parts are trained like ``parameter``."""
    return paddle.ParamAttr(
        initializer=initializer_of(parameter) or paddle.nn.initializer.Constant(0.0),
        learning_rate=parameter.optimize_attr["learning_rate"],
        regularizer=parameter.regularizer,
        trainable=not parameter.stop_gradient,
        need_clip=parameter.need_clip,
    )


def _require_linear(model: Layer, path: str) -> Layer:
    """Returns the Linear that the parts replace; raises ConfigError if it cannot be replaced."""
    layers = dict(model.named_sublayers())
    linear = layers.get(path)
    if type(linear) is not paddle.nn.Linear:
        linears = [name for name, layer in layers.items() if type(layer) is paddle.nn.Linear]
        raise ConfigError(
            "vocabulary_head names the nn.Linear that gives the logits",
            got=repr(path) if linear is None else f"{path!r}, a {type(linear).__name__}",
            fix=nearest(str(path), linears) if linears else "leave it out",
        )
    if [id(weight) for weight in model.state_dict().values()].count(id(linear.weight)) > 1:
        raise ConfigError(
            f"other layers use the weights of {path!r} as well",
            fix="describe the model as a list of layers with VocabularyEmbedding and "
            "VocabularyHead(.., tied=..)",
        )
    if is_patched(linear):
        raise ConfigError(
            f"{path!r} has hooks, or a forward of its own, which its parts would not run",
            fix="take them off, as paddle.nn.utils.remove_weight_norm does, or leave "
            "vocabulary_head out",
        )
    return linear


@contextmanager
def in_place(model: Layer, path: str, ranks: int) -> Iterator[HeadInParts]:
    """Replaces a Linear of a model by a head in parts; an error in the context undoes this.

    Args:
        model: The model.
        path: The name of the Linear that gives the model's logits.
        ranks: The number of parts.

    Raises:
        ConfigError: The model has no Linear of that name, other layers use its weights, or it has
            hooks.
    """
    linear = _require_linear(model, path)
    head = HeadInParts(linear, path, ranks)
    _replace_sublayer(model, path, head)
    try:
        yield head
    except BaseException:
        _replace_sublayer(model, path, linear)
        raise


def _replace_sublayer(model: Layer, path: str, layer: Layer) -> None:
    """Replaces the sublayer of a model that has the name ``path`` by another layer."""
    owner, _, name = path.rpartition(".")
    sublayers_in(dict(model.named_sublayers(include_self=True))[owner])[name] = layer
