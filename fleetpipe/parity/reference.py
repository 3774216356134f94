"""The single-device model that is trained, in one process, on the pipeline's micro-batches.

Start with ``of_same_layers`` and ``of_model``, which make a ``Reference``. ``AttributeCopies``
gives it the plain attributes that a script changes on layers between two batches, such as a
temperature; plain are numbers, texts, functions, tensors without gradients, and lists, tuples and
dicts of them. ``ComparingOptimizer`` compares the gradients and steps both sides, ``Rates`` the
learning rates.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from fleetpipe.aliases import Layer, Nest, Optimizer, Scheduler, Tensor
from fleetpipe.compare.differences import (
    Difference,
    compare,
    compare_all,
    compare_numbers,
    digest_of,
)
from fleetpipe.dygraph import (
    PipelineLayer,
    PipelineOptimizer,
    SingleModel,
    random_keys,
    tensor_parallel,
)
from fleetpipe.dygraph.backward.layer_state import PADDLES_ATTRIBUTES
from fleetpipe.dygraph.function_code import closure_values
from fleetpipe.dygraph.gradients import dense
from fleetpipe.dygraph.layer_kinds import is_spread
from fleetpipe.dygraph.train.training_batch import step_rate
from fleetpipe.errors import UsageError
from fleetpipe.job.job import current_job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, layer_at, state_slots
from fleetpipe.paddle_api.optimizer import copy_optimizer, learning_rate_of
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.representation import shows

_PLAIN_TYPES = (bool, int, float, str, type(None))

#: The path of a layer in the whole model, and the name of an attribute.
AttributeKey = tuple[str, str]

#: Functions of the inputs and the label of a micro-batch that return its loss, or its losses.
LossOf = Callable[[Nest, Nest], Tensor]
LossesOf = Callable[[Nest, Nest], Sequence[Tensor]]

#: By parameter, the squared norms of its gradients in the pipeline and in the reference.
Squares = dict[str, tuple[float, float]]


class AttributeCopies:
    """Copies to a reference the plain attributes that a script changes on a pipeline's layers.

    Attributes that a batch changes, such as a counter, are not copied: each side changes its own.
    """

    def __init__(self, model: Layer, pipe: PipelineLayer) -> None:
        """Notes the attributes before the first batch.

        Attributes that differ between reference and pipeline by then are copied, since the script
        has set them. Those of tensor-parallel shards are not copied: shards have other values, such
        as their number of heads.
        """
        # The model may be a layer that wraps a copy of a captured model.
        self._model: Layer = getattr(model, "plain", model)
        job = current_job()
        shards = job is not None and any(
            getattr(job.degrees, a) > 1 for a in (*SHARDS, *SEQUENCE, "ep")
        )
        #: The text of each plain attribute when attributes were noted last.
        self._text_by_attribute: dict[AttributeKey, str] = {}
        self.remember(pipe.with_modes if shards else self._model)

    def copy_changed(self, pipe: PipelineLayer) -> None:
        """Copies the pipeline's attributes that have changed since the last :meth:`remember`.

        Functions are copied only from this rank's layers, since a message cannot carry them.
        Collective over the pipeline.
        """
        changed = {
            key: value  # the key is the path of a layer and the name of the attribute
            for key, value, text in _plain_attributes(pipe.with_modes)
            if self._text_by_attribute.get(key) != text and (key[0] or pipe.with_modes is not pipe)
        }
        sent = [[*key, value] for key, value in changed.items() if _can_be_sent(value)]
        for part in pipe.holders().all_gather(sent):
            for path, name, value in part:
                changed.setdefault((path, name), value)
        layers = dict(self._model.named_sublayers(include_self=True))
        for (path, name), value in changed.items():
            if path in layers:
                # Paddle registers a tensor as a buffer that no state dict has.
                setattr(layers[path], name, copy.deepcopy(value))

    def remember(self, model: Layer) -> None:
        """Stores a model's plain attributes as texts, to see later which have changed."""
        self._text_by_attribute = {key: text for key, _, text in _plain_attributes(model)}


def _plain_attributes(model: Layer) -> Iterator[tuple[AttributeKey, Any, str]]:
    """Yields the plain attributes of all layers, each with a text by which it is compared."""
    for path, layer in model.named_sublayers(include_self=True):
        attributes = {n: v for n, v in vars(layer).items() if n not in PADDLES_ATTRIBUTES}
        saved = paddle.nn.Layer.state_dict(layer, include_sublayers=False)
        attributes.update((n, t) for n, t in buffers_in(layer).items() if n not in saved)
        for name, value in attributes.items():
            if (text := _text_of_value(value)) is not None:
                yield (path, name), value, text


def _text_of_value(value: Any, around: tuple[int, ...] = ()) -> str | None:
    """Returns a text that is equal for equal values only; None if the value is not plain.

    Two functions are equal if they have the same code, and equal values in their closures and
    defaults. A function of fleetpipe is not plain: fleetpipe puts it on a layer in place of the
    layer's own method, and no script has set it.

    Args:
        value: The value.
        around: The ids of the functions and containers that hold the value, the outermost first. A
            value that holds itself, as a recursive local function does, is told by its place there.
    """
    if type(value) in _PLAIN_TYPES:
        return repr(value)
    if isinstance(value, paddle.Tensor):
        plain = value.stop_gradient and not is_parameter(value)
        return digest_of(value) if plain and has_memory(value) and value.is_dense() else None
    if id(value) in around:
        return f"holder {around.index(id(value))}"
    around = (*around, id(value))
    if isinstance(value, FunctionType):
        if value.__module__.startswith("fleetpipe."):
            return None
        return _text_of_parts(f"function {id(value.__code__)}", closure_values(value), around)
    if type(value) is dict:
        return _text_of_parts("dict", [*value.keys(), *value.values()], around)
    if type(value) in (list, tuple):
        return _text_of_parts(type(value).__name__, value, around)
    return None


def _text_of_parts(
    kind: str, parts: list[Any] | tuple[Any, ...], around: tuple[int, ...]
) -> str | None:
    """Returns a text for a container or function from its parts; None if a part is not plain.

    Args:
        kind: The type of the container, or what identifies the function's code.
        parts: The items, with the keys of a dict first; for a function the values that it holds.
        around: As for :func:`_text_of_value`, with the container or function itself.
    """
    texts = [text for part in parts if (text := _text_of_value(part, around)) is not None]
    return f"{kind}({', '.join(texts)})" if len(texts) == len(parts) else None


def _can_be_sent(value: Any) -> bool:
    """Returns whether a plain value can be sent to another rank.

    A value without functions, whose dicts have only texts as keys, can.
    """
    if type(value) is dict:
        return all(type(key) is str and _can_be_sent(part) for key, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_can_be_sent, value))
    return not isinstance(value, FunctionType)


@shows("model", "optimizer")
@dataclass(eq=False, repr=False)
class Reference:
    """A Layer that holds the whole model, and an optimizer over its parameters.

    Every rank of the pipeline has a Reference. Parameters and buffers have the pipeline's names.

    Attributes:
        model: The Layer.
        losses_of: ``losses_of(inputs, label)`` runs the model and returns the losses of a
            micro-batch; backward starts from the first.
        optimizer: An optimizer of the model's parameters; None copies the pipeline's.
        names: By the name of a parameter or buffer in the model, its name in the pipeline.
        takes_rate: Whether the reference's learning rate is copied from the pipeline.
        takes_switches: Whether ``stop_gradient``, ``need_clip`` and the layers' modes are copied
            from the pipeline; for a user's own model they are not.
        attributes: Copies the plain attributes of the pipeline's layers; None for a user's own
            model, and for a model that is copied as a whole when they change.
        uncompared: The parameters whose gradients are not compared, by the pipeline's names.
    """

    model: Layer
    losses_of: LossesOf
    optimizer: Optimizer
    names: Mapping[str, str]
    takes_rate: bool = True
    takes_switches: bool = False
    attributes: AttributeCopies | None = None
    uncompared: frozenset[str] = frozenset()
    #: By the path of a layer, its mode in training, as in the pipeline.
    _modes: dict[str, bool] = field(default_factory=dict)
    #: By the id of the pipeline's optimizer, the copy of it.
    _optimizer_copies: dict[int, Optimizer] = field(default_factory=dict)
    #: The parameters that this rank's copy steps; None if it steps all.
    _stepped_here: frozenset[str] | None = None
    #: The ranks whose copies step the other parameters.
    _holders: Group = field(default_factory=SoleGroup)

    def train_like(self, optimizer: PipelineOptimizer, pipe: PipelineLayer) -> None:
        """Sets a copy of the pipeline's optimizer, unless the reference has one of its own.

        Collective over the pipeline the first time.
        """
        if self.optimizer is not None and not self._optimizer_copies:
            rate = learning_rate_of(optimizer.wrapped)
            self.takes_rate = rate is learning_rate_of(self.optimizer)
            return
        copied = self._optimizer_copies.get(id(optimizer.wrapped))
        self.optimizer = copied or self.copy_of(optimizer, pipe)
        self._optimizer_copies[id(optimizer.wrapped)] = self.optimizer
        ours = pipe.state.own_parameters()  # those of this rank's stages
        # The other ranks send their parameters after each step.
        self._holders = pipe.holders()
        all_here = ours.keys() == {self.names[name] for name, _ in self.model.named_parameters()}
        self._stepped_here = None if all_here else frozenset(pipe.state.local_tensors())

    def copy_of(
        self, optimizer: PipelineOptimizer, pipe: PipelineLayer, only: Mapping[str, Tensor] = {}
    ) -> Optimizer:
        """Returns a copy of the pipeline's optimizer, with its state, for this model's parameters.

        The copy steps all parameters of this rank, or those in ``only``. Collective over the
        pipeline the first time.
        """
        ours = only or pipe.state.own_parameters()
        parameters = {self.names[name]: p for name, p in self.model.named_parameters()}
        for name, parameter in ours.items():
            # Experts that only this rank has are marked for the copy too.
            parameters[name].no_sync = is_spread(parameter)
        # The copy's global norm is summed in the order of the model, as the pipeline's is.
        optimizer.bind(pipe)
        with paddle.utils.unique_name.guard():
            return copy_optimizer(optimizer.wrapped, ours, parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the model, by the pipeline's names."""
        state = self.model.state_dict()
        return {in_pipeline: state[name] for name, in_pipeline in self.names.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the parameters that have one, by the pipeline's names."""
        tensors = self.tensors().items()
        return {name: dense(t.grad, t) for name, t in tensors if t.grad is not None}

    def hidden_places(self) -> dict[str, tuple[dict[str, Tensor], str]]:
        """Returns the dict and the key of each buffer that :attr:`names` lacks, by pipeline's name.

        Most are in no state dict. Of a user's own model these are buffers of layers that own
        parameters: the pipeline has no names for other layers.
        """
        if isinstance(self.model, SingleModel):
            places = self.model.hidden_buffers()
            for name in self.model.state_dict().keys() - self.names.keys():
                path, _, key = name.rpartition(".")
                places[name] = buffers_in(layer_at(self.model, path)), key
            return places
        places, named = {}, set(self.names.values())
        pipeline_paths = {
            name.rpartition(".")[0]: in_pipeline.rpartition(".")[0]
            for name, in_pipeline in self.names.items()
        }
        for path, layer in self.model.named_sublayers(include_self=True):
            if path not in pipeline_paths:
                continue
            for tensors, key in state_slots(layer):
                in_pipeline = f"{pipeline_paths[path]}.{key}"
                if in_pipeline not in named:
                    places[in_pipeline] = tensors, key
        return places

    def copy_hidden_buffers(self, pipe: PipelineLayer) -> None:
        """Copies the pipeline's buffers that no state dict has. Collective over the pipeline."""
        places = self.hidden_places()
        for part in pipe.holders().all_gather(pipe.state.hidden_buffers()):
            for name in part.keys() & places.keys():
                holder, key = places[name]
                holder[key] = part[name].detach().clone()

    def train(self) -> None:
        """Puts the model into training mode, except layers that the pipeline evaluates."""
        self.model.train()
        for path, layer in self.model.named_sublayers():
            layer.training = self._modes.get(path, layer.training)

    def copy_switches(self, pipe: PipelineLayer) -> None:
        """Copies ``stop_gradient``, ``need_clip``, layers' modes and plain attributes. Collective.

        A script may change them on the pipeline between two batches. A user's own model is not
        changed.
        """
        switches = {
            name: (p.stop_gradient, p.need_clip) for name, p in pipe.state.own_parameters().items()
        }
        # A captured pipeline has modes of the whole plain model: a rank's own layers decide.
        modes, here = dict(pipe.modes_in_training()), {*map(id, pipe.sublayers())}
        layers = pipe.with_modes.named_sublayers()
        modes_here = {path: modes[path] for path, layer in layers if id(layer) in here}
        parts = pipe.holders().all_gather((switches, modes_here))
        if self.takes_switches:
            tensors = self.tensors()
            for part, modes_there in parts:
                modes.update(modes_there)
                for name, (stop_gradient, need_clip) in part.items():
                    tensors[name].stop_gradient = stop_gradient
                    tensors[name].need_clip = need_clip
            self._modes = modes
        if self.attributes is not None:
            self.attributes.copy_changed(pipe)

    def remember_attributes(self, pipe: PipelineLayer) -> None:
        """Stores the plain attributes of the pipeline's layers at a batch's end, to compare."""
        if self.attributes is not None:
            self.attributes.remember(pipe.with_modes)

    def step(self) -> None:
        """Updates the parameters and clears the gradients. Collective for a copied optimizer."""
        # Paddle counts the names of optimizers' states: the pipeline's keep their numbers.
        with paddle.utils.unique_name.guard():
            self.optimizer.step()
        self.optimizer.clear_grad()
        if self._stepped_here is None:
            return
        tensors = self.tensors()
        stepped = {name: tensors[name].detach() for name in sorted(self._stepped_here)}
        for part in self._holders.all_gather(stepped):
            for name in part.keys() - self._stepped_here:
                tensors[name].set_value(part[name])


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors, added one after another."""
    return functools.reduce(operator.add, tensors)


def of_model(
    pipe: PipelineLayer, model: Layer, loss_of: LossOf | None, optimizer: Optimizer | None
) -> Reference:
    """Makes a reference from a single-device model, which gets the pipeline's weights.

    Collective over the pipeline.

    Args:
        pipe: The pipeline's layers.
        model: A Layer with the same parameters in the same order.
        loss_of: ``loss_of(inputs, label)`` returns the loss of a micro-batch; None applies the
            pipeline's loss functions to ``model(inputs)``.
        optimizer: An optimizer of its parameters; None copies the pipeline's.
    """
    pipe.copy_to(model)

    def losses_of(inputs: Nest, label: Nest) -> Sequence[Tensor]:
        if loss_of is not None:
            return [loss_of(inputs, label)]
        output = model(inputs)
        random_keys.enter_loss(pipe.loss_functions())
        return [function(output, label) for function in pipe.loss_functions()]

    reference = Reference(model, losses_of, optimizer, pipe.state.names_in(model))
    reference.copy_hidden_buffers(pipe)
    return reference


def of_same_layers(pipe: PipelineLayer) -> Reference:
    """Makes a reference from copies of the pipeline's layers and of its optimizer.

    Collective over the pipeline.

    Raises:
        UsageError: The loss has trained parameters: both sides would add to their gradients.
    """
    if any(not parameter.stop_gradient for parameter in pipe.loss_parameters()):
        raise UsageError(
            "parity with the pipeline's own layers needs a loss without trained parameters",
            fix="put what is trained into the last layer, or pass a model and a loss_of of its own",
        )
    reference = of_model(pipe, pipe.single_model(), None, None)
    reference.takes_switches = True
    reference.attributes = AttributeCopies(reference.model, pipe)
    return reference


class Rates:
    """Gives a reference the pipeline's learning rate for one step, then compares both rates.

    Since the script may change the rate between two steps, the reference starts each step with a
    copy of the pipeline's scheduler or rate. It steps its copy of the scheduler.
    """

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        reference: Optimizer,
        lr_scheduler: Scheduler | None,
        follow: bool,
    ) -> None:
        """Copies the pipeline's rate at the begin of a step.

        Args:
            optimizer: The pipeline's optimizer.
            reference: The reference's optimizer.
            lr_scheduler: The scheduler that the pipeline steps after the optimizer, or None.
            follow: Whether the reference takes the pipeline's rate. A user's own optimizer may have
                a scheduler of its own, which the user steps.
        """
        self._optimizer, self._of_reference = optimizer.wrapped, reference
        self._scheduler, self._copied_scheduler = lr_scheduler, lr_scheduler
        rate = learning_rate_of(self._optimizer)
        self._follow = follow or learning_rate_of(reference) is rate
        if not self._follow:
            return
        # A scheduler may refer to its optimizer, and one scheduler to another.
        memo = {id(optimizer): reference, id(self._optimizer): reference}
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            reference.set_lr_scheduler(copy.deepcopy(rate, memo))
        else:
            reference.set_lr(rate)
        self._copied_scheduler = copy.deepcopy(lr_scheduler, memo)

    def compare(self, step: int) -> list[Difference]:
        """Compares the current learning rates of the optimizers."""
        ours, expected = self._optimizer.get_lr(), self._of_reference.get_lr()
        return compare_numbers("learning rate", "", step, ours, expected)

    def step(self, step: int, loss: Nest) -> list[Difference]:
        """Steps the reference's scheduler after the pipeline stepped its own, and compares both."""
        if not self._follow:
            return []
        step_rate(self._copied_scheduler, loss)
        differences = self.compare(step)
        # Schedulers that have made different numbers of steps may still have the same rate.
        schedulers = self._scheduler, self._copied_scheduler
        ours, expected = (getattr(scheduler, "last_epoch", 0) for scheduler in schedulers)
        name = type(self._scheduler).__name__
        return differences + compare_numbers("last_epoch", name, step, ours, expected)


class ComparingOptimizer(PipelineOptimizer):
    """An optimizer that compares the complete gradients of both sides, then steps both sides.

    Attributes:
        differences: The differences of the gradients on this rank, then those that the
            constructor's ``before`` returns.
        squares: The squared norms of this rank's gradients on both sides, for the global norm.
    """

    def __init__(
        self,
        optimizer: PipelineOptimizer,
        reference: Reference,
        layers: PipelineLayer,
        step: int,
        is_rounding: Callable[[Difference], bool],
        before: Callable[[list[Difference]], list[Difference]],
    ) -> None:
        """Wraps the pipeline's optimizer for one step.

        Args:
            optimizer: The pipeline's optimizer.
            reference: The single-device side, with the gradients of the batch.
            layers: The ``PipelineLayer``.
            step: The training step.
            is_rounding: Tells whether a gradient's difference is rounding; if so, both sides step
                with the pipeline's gradient.
            before: Called before the step with the differences of the gradients; returns further
                differences.
        """
        super().__init__(optimizer.wrapped)
        self._pipeline_optimizer = optimizer
        self.differences: list[Difference] = []
        self.squares: Squares = {}
        self._reference = reference
        self._parameters = layers.state.own_parameters()
        self._step_number = step
        self._is_rounding = is_rounding
        self._compare_before_step = before

    def bind(self, layers: PipelineLayer) -> None:
        """Passes the layers to the pipeline's optimizer, which needs them to clip gradients."""
        self._pipeline_optimizer.bind(layers)

    def step(self) -> None:
        """Compares the gradients, and steps both optimizers. Collective."""
        reference = self._reference.tensors()
        for name, parameter in self._parameters.items():
            grad = parameter.grad if self.shards is None else self.shards.gradient(parameter)
            grad, expected = _full_tensor(grad, parameter), reference[name].grad
            difference = compare("gradient", name, self._step_number, grad, expected)
            if difference:
                self.differences.append(difference)
                if grad is not None and self._is_rounding(difference):
                    # Adam divides a gradient by its size, so in tiny ones the last bits count: the
                    # reference steps with the pipeline's gradient.
                    reference[name].grad = grad.detach().clone()
            self.squares[name] = (_squared_norm(grad), _squared_norm(expected))
        self.differences += self._compare_before_step(self.differences)
        self._pipeline_optimizer.step()
        self._reference.step()


def compare_state(
    layers: PipelineLayer, reference: Reference, step: int, buffers_too: bool
) -> list[Difference]:
    """Compares the parameters and buffers of this rank with the reference's. Collective for shards.

    Args:
        layers: The pipeline's layers.
        reference: The model on one device.
        step: The training step.
        buffers_too: Whether to compare untrained parameters and buffers too. They differ if this
            replica has not seen all the data.

    Returns:
        The differences on this rank.
    """
    tensors = reference.tensors()
    # Running statistics may be untrained parameters in Paddle.
    of_stages = layers.state.own_parameters().items()
    parameters = {n: _full_tensor(p, p) for n, p in of_stages if buffers_too or not p.stop_gradient}
    differences = compare_all("parameter", step, parameters, {n: tensors[n] for n in parameters})
    if not buffers_too:
        return differences
    places = reference.hidden_places()
    tensors.update((name, holder[key]) for name, (holder, key) in places.items() if key in holder)
    buffers = {**layers.state.local_tensors(), **layers.state.hidden_buffers()}
    buffers = {
        n: _full_tensor(t, t) for n, t in buffers.items() if n not in parameters and n in tensors
    }
    return differences + compare_all("buffer", step, buffers, {n: tensors[n] for n in buffers})


def _full_tensor(value: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Joins the ranks' shards of a parameter, or of its gradient, to the full tensor. Collective.

    A tensor that is no shard is returned as it is.
    """
    if value is None or tensor_parallel.shard_in(parameter) is None:
        return value
    return tensor_parallel.whole_value(value, parameter)


def _squared_norm(grad: Tensor | None) -> float:
    """Returns the sum of the squares of a gradient; 0 for None."""
    return 0.0 if grad is None else float((grad.astype("float64") ** 2).sum())
