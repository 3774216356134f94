"""The single-device model, trained on the same micro-batches as the pipeline in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.dygraph import (
    PipelineLayer,
    PipelineOptimizer,
    SingleModel,
    random_places,
)
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import dense
from fleetpipe.errors import UsageError
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, layer_at, state_slots
from fleetpipe.paddle_api.optimizer import copy_optimizer, learning_rate_of
from fleetpipe.parity.attributes import AttributeCopies
from fleetpipe.representation import shows

LossOf = Callable[[Nest, Nest], Tensor]
LossesOf = Callable[[Nest, Nest], Sequence[Tensor]]


@shows("model", "optimizer")
@dataclass(eq=False, repr=False)
class Reference:
    """A Layer that holds the whole model, and an optimizer over its parameters.

    Every rank of the pipeline has its own. Parameters and buffers have the pipeline's names.

    Attributes:
        model: The Layer.
        losses_of: ``losses_of(inputs, label)`` runs the model and returns the losses of a
            micro-batch; backward starts from the first.
        optimizer: An optimizer of the model's parameters; None copies the pipeline's.
        names: The pipeline's name of each of the model's parameters and buffers.
        takes_rate: Whether the pipeline's learning rate is the reference's too.
        takes_switches: Whether the pipeline says what is trained, clipped and in which mode; a
            user's own model says it itself.
        attributes: Copies the plain attributes of the pipeline's layers; None for a user's own
            model, and where the model is copied anew when they change.
        uncompared: The parameters whose gradients are of no interest, by the pipeline's names.
    """

    model: Layer
    losses_of: LossesOf
    optimizer: Optimizer
    names: Mapping[str, str]
    takes_rate: bool = True
    takes_switches: bool = False
    attributes: AttributeCopies | None = None
    uncompared: frozenset[str] = frozenset()
    _modes: dict[str, bool] = field(default_factory=dict)
    _copies: dict[int, Optimizer] = field(default_factory=dict)
    _stepped_here: frozenset[str] | None = None
    _holders: Group = field(default_factory=SoleGroup)

    def train_like(self, optimizer: PipelineOptimizer, pipe: PipelineLayer) -> None:
        """Trains with a copy of the pipeline's optimizer, unless it has its own.

        Collective over the pipeline the first time.
        """
        if self.optimizer is not None and not self._copies:
            rate = learning_rate_of(optimizer.wrapped)
            self.takes_rate = rate is learning_rate_of(self.optimizer)
            return
        copied = self._copies.get(id(optimizer.wrapped))
        self.optimizer = copied or self.copy_of(optimizer, pipe)
        self._copies[id(optimizer.wrapped)] = self.optimizer
        ours = pipe.state.own_parameters()
        # The others come from the other ranks after each step.
        self._holders = pipe.holders()
        all_here = ours.keys() == {self.names[name] for name, _ in self.model.named_parameters()}
        self._stepped_here = None if all_here else frozenset(pipe.state.local_tensors())

    def copy_of(
        self, optimizer: PipelineOptimizer, pipe: PipelineLayer, only: Mapping[str, Tensor] = {}
    ) -> Optimizer:
        """Returns a copy of the pipeline's optimizer, with its state, for this model's parameters.

        It steps all parameters of this rank, or those in ``only``. Collective over the pipeline the
        first time.
        """
        ours = only or pipe.state.own_parameters()
        parameters = {self.names[name]: p for name, p in self.model.named_parameters()}
        for name, parameter in ours.items():
            # The copy too steps and counts experts that other ranks do not.
            parameters[name].no_sync = is_spread(parameter)
        # The copy's global norm is summed in the order of the model, as the pipeline's is.
        optimizer.bind(pipe)
        with paddle.utils.unique_name.guard():
            return copy_optimizer(optimizer.wrapped, ours, parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the model."""
        state = self.model.state_dict()
        return {other: state[name] for name, other in self.names.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the parameters that have one."""
        tensors = self.tensors().items()
        return {name: dense(t.grad, t) for name, t in tensors if t.grad is not None}

    def hidden_places(self) -> dict[str, tuple[dict[str, Tensor], str]]:
        """Returns the places of buffers that no state dict had when the model was built.

        For a user's own model it returns those in layers that own parameters: others have no name
        that the pipeline knows.
        """
        if isinstance(self.model, SingleModel):
            places = self.model.hidden_buffers()
            for name in self.model.state_dict().keys() - self.names.keys():
                holder, _, key = name.rpartition(".")
                places[name] = buffers_in(layer_at(self.model, holder)), key
            return places
        owners = {inner.rpartition(".")[0]: n.rpartition(".")[0] for inner, n in self.names.items()}
        return {
            f"{owners[path]}.{name}": (holder, name)
            for path, layer in self.model.named_sublayers(include_self=True)
            for holder, name in state_slots(layer)
            if path in owners and f"{owners[path]}.{name}" not in self.names.values()
        }

    def take_hidden_buffers(self, pipe: PipelineLayer) -> None:
        """Copies the pipeline's buffers that no state dict has. Collective over the pipeline."""
        places = self.hidden_places()
        for part in pipe.holders().all_gather(pipe.state.hidden_buffers()):
            for name in part.keys() & places.keys():
                holder, key = places[name]
                holder[key] = part[name].detach().clone()

    def train(self) -> None:
        """Puts the model into training, and the layers that the pipeline evaluates into that."""
        self.model.train()
        for path, layer in self.model.named_sublayers():
            layer.training = self._modes.get(path, layer.training)

    def take_switches(self, pipe: PipelineLayer) -> None:
        """Copies what is trained and clipped, layers' modes and plain attributes. Collective.

        A script may change them in the pipeline after it built that. A user's own model stays as it
        is.
        """
        switches = {
            name: (p.stop_gradient, p.need_clip) for name, p in pipe.state.own_parameters().items()
        }
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
            self.attributes.take(pipe)

    def note_attributes(self, pipe: PipelineLayer) -> None:
        """Notes the plain attributes of the pipeline's layers at the end of a batch."""
        if self.attributes is not None:
            self.attributes.note(pipe)

    def step(self) -> None:
        """Updates the parameters and clears the gradients. Collective for a copied optimizer."""
        # Names of an optimizer's state are counted: the pipeline's are to be those of a first one.
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
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def of_model(
    pipe: PipelineLayer, model: Layer, loss_of: LossOf | None, optimizer: Optimizer | None
) -> Reference:
    """Makes a reference of the user's own single-device model and optimizer.

    Collective over the pipeline: the model gets the pipeline's weights.

    Args:
        pipe: The pipeline's layers.
        model: A Layer with the same parameters in the same order.
        loss_of: ``loss_of(inputs, label)``; None is the pipeline's loss of ``model(inputs)``.
        optimizer: An optimizer of its parameters; None copies the pipeline's.
    """
    pipe.copy_to(model)

    def losses_of(inputs: Nest, label: Nest) -> Sequence[Tensor]:
        if loss_of is not None:
            return [loss_of(inputs, label)]
        output = model(inputs)
        random_places.enter_loss(pipe.loss_functions())
        return [function(output, label) for function in pipe.loss_functions()]

    reference = Reference(model, losses_of, optimizer, pipe.state.names_in(model))
    reference.take_hidden_buffers(pipe)
    return reference


def of_same_layers(pipe: PipelineLayer) -> Reference:
    """Makes a reference of the pipeline's own list of layers, with a copy of its optimizer.

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
