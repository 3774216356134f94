"""The single-device model, trained on the same micro-batches as the pipeline in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.dygraph import (
    PipelineLayer,
    PipelineOptimizer,
    SingleModel,
    random_keys,
    random_places,
    weighted,
)
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import WHOLE, Units, UnitStates
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import cause_of_backward, dense, drop_gradients
from fleetpipe.dygraph.layer_kinds import fill_gradients
from fleetpipe.dygraph.sums.gradient_trees import GradientTrees
from fleetpipe.dygraph.sums.uses import Uses
from fleetpipe.errors import UsageError
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, layer_at, state_slots
from fleetpipe.paddle_api.optimizer import learning_rate_of, twin_optimizer
from fleetpipe.parity.cutting import copy_of
from fleetpipe.parity.outputs import backward_running
from fleetpipe.representation import shows
from fleetpipe.schedules.action import GlobalMicroBatch

LossOf = Callable[[Nest, Nest], Tensor]
LossesOf = Callable[[Nest, Nest], Sequence[Tensor]]


@shows("model", "optimizer")
class Reference:
    """A Layer that holds the whole model, and an optimizer over its parameters.

    Every rank of the pipeline has its own. Parameters and buffers have the pipeline's names.
    """

    def __init__(
        self,
        model: Layer,
        losses_of: LossesOf,
        optimizer: Optimizer | None,
        names: Mapping[str, str],
    ) -> None:
        """Takes the single-device side of a comparison.

        Args:
            model: The Layer.
            losses_of: ``losses_of(inputs, label)`` runs the model and returns the losses of a
                micro-batch; backward starts from the first.
            optimizer: An optimizer of the model's parameters; None makes a twin of the pipeline's.
            names: The pipeline's name of each of the model's parameters and buffers.
        """
        self.model = model
        self.names = names
        self.optimizer: Optimizer = optimizer
        self.losses_of = losses_of
        #: Whether the pipeline's learning rate is the reference's too.
        self.takes_rate = True
        #: Whether the pipeline says what is trained and clipped; a user's own model says it itself.
        self.takes_switches = False
        #: The parameters whose gradients are of no interest, by the pipeline's names.
        self.uncompared: frozenset[str] = frozenset()
        self._twins: dict[int, Optimizer] = {}
        self._has_own_optimizer = optimizer is not None
        self._stepped_here: frozenset[str] | None = None
        self._holders: Group = SoleGroup()

    def train_like(self, optimizer: PipelineOptimizer, pipe: PipelineLayer) -> None:
        """Trains with a twin of the pipeline's optimizer, unless it has its own.

        Collective over the pipeline the first time.
        """
        if self._has_own_optimizer:
            rate = learning_rate_of(optimizer.wrapped)
            self.takes_rate = rate is learning_rate_of(self.optimizer)
            return
        twin = self._twins.get(id(optimizer.wrapped))
        self.optimizer = twin or self.twin_of(optimizer, pipe)
        self._twins[id(optimizer.wrapped)] = self.optimizer
        ours = pipe.state.own_parameters()
        # The others come from the other ranks after each step.
        self._holders = pipe.holders()
        all_here = ours.keys() == {self.names[name] for name, _ in self.model.named_parameters()}
        self._stepped_here = None if all_here else frozenset(pipe.state.local_tensors())

    def twin_of(
        self, optimizer: PipelineOptimizer, pipe: PipelineLayer, only: Mapping[str, Tensor] = {}
    ) -> Optimizer:
        """Returns a copy of the pipeline's optimizer, with its state, for this model's parameters.

        It steps all parameters of this rank, or those in ``only``. Collective over the pipeline the
        first time.
        """
        ours = only or pipe.state.own_parameters()
        parameters = {self.names[name]: p for name, p in self.model.named_parameters()}
        for name, parameter in ours.items():
            # The twin too steps and counts experts that other ranks do not.
            parameters[name].no_sync = is_spread(parameter)
        # A global norm of the twin's is summed in the order of the model, as the pipeline's is.
        optimizer.bind(pipe)
        with paddle.utils.unique_name.guard():
            return twin_optimizer(optimizer.wrapped, ours, parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the model."""
        state = self.model.state_dict()
        return {other: state[name] for name, other in self.names.items()}

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

    def accumulate(
        self,
        inputs: Sequence[Nest],
        labels: Sequence[Nest],
        weights: Sequence[Fraction],
        first: int = 0,
        units: Units = WHOLE,
        functions: Sequence[LossOf] = (),
        trees: GradientTrees | None = None,
    ) -> list[list[Tensor]]:
        """Runs all micro-batches forward and backward, one after another.

        Under the keys of a batch (``random_keys.under_keys``) micro-batch 0 has the random stream
        of the global micro-batch ``first``, and so on. The units of a micro-batch run forward one
        after another, and backward in reverse, as in a stage. ``functions``, the pipeline's loss
        functions, set the weight of a unit in the loss. ``trees`` sum the gradients, if they are
        given.

        Returns:
            For each loss function, the share of each unit in the loss of the batch; the gradients
            are on the parameters.
        """
        self.model.train()
        batches = MicroBatches(inputs, labels)
        weight_of = units.weight_of(functions, batches, lambda _, number: weights[number])
        states = units.states()
        keys = random_keys.current()
        shares: list[list[Tensor]] = []
        for number, (value, label) in enumerate(zip(*units.cut(batches))):
            if keys is not None:
                keys.micro_batch = GlobalMicroBatch(first * units.count + number)
            with states.forward(0, number):
                # Of copies, for the same micro-batches may run again.
                losses = self.losses_of(copy_of(value), copy_of(label))
            shares.append([weighted(loss, weight_of(i, number)) for i, loss in enumerate(losses)])
            if (number + 1) % units.count == 0:
                for last in range(number, number - units.count, -1):
                    _backward(states, last, shares[last])
                if trees is not None:
                    trees.take(0, number, complete=True)
        if trees is not None:
            trees.finish()
            trees.uses.end()
        parameters = {self.names[n]: p for n, p in self.model.named_parameters()}
        fill_gradients(parameters)
        drop_gradients(parameters[name] for name in parameters.keys() & self.uncompared)
        return [list(of_function) for of_function in zip(*shares)]

    def begin_trees(self, micro_batches: int) -> GradientTrees:
        """Returns what sums the gradients of a batch by trees.

        A model of the user's own counts as one use of each of its parameters.
        """
        if isinstance(self.model, SingleModel):
            return GradientTrees(self.model.begin_uses(), micro_batches)
        entries = {0: self.model.parameters()}
        return GradientTrees(Uses({0: entries}, lambda _number, _parameter: (), ()), micro_batches)

    def take_gradients(self) -> list[Tensor | None]:
        """Returns copies of the gradients, and removes them from the parameters."""
        parameters = self.model.parameters()
        gradients = [None if p.grad is None else dense(p.grad, p).clone() for p in parameters]
        drop_gradients(parameters)
        return gradients

    @paddle.no_grad()
    def add_up(self, gradients: Sequence[Sequence[Tensor | None]], share: Fraction) -> None:
        """Sets each parameter's gradient to the sum of ``share`` of it in each list, in order."""
        for parameter, of_replicas in zip(self.model.parameters(), zip(*gradients)):
            parts = [weighted(gradient, share) for gradient in of_replicas if gradient is not None]
            if parts:
                parameter.grad = sum_in_order(parts)

    def take_switches(self, pipe: PipelineLayer) -> None:
        """Copies from the pipeline which parameters are trained and clipped. Collective.

        A script may freeze parameters after it built the layers. A user's own model stays as it is.
        """
        switches = {
            name: (p.stop_gradient, p.need_clip) for name, p in pipe.state.own_parameters().items()
        }
        parts = pipe.holders().all_gather(switches)
        if self.takes_switches:
            tensors = self.tensors()
            for part in parts:
                for name, (stop_gradient, need_clip) in part.items():
                    tensors[name].stop_gradient = stop_gradient
                    tensors[name].need_clip = need_clip

    @paddle.no_grad()
    def divide_gradients(self, divisor: Fraction) -> None:
        """Divides all gradients, as ``delay_scale_loss`` does after backward."""
        for parameter in self.model.parameters() if divisor != 1 else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / int(divisor)

    def step(self) -> None:
        """Updates the parameters and clears the gradients. Collective for a twin's optimizer."""
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


@backward_running()
def _backward(states: UnitStates, number: int, losses: list[Tensor]) -> None:
    """Runs the backward of a unit from its first loss, and detaches all its losses."""
    try:
        with states.backward(0, number) as (kept, grads):
            paddle.autograd.backward([losses[0], *kept], [None, *grads])
        states.release(0, number)
    except Exception as error:
        raise cause_of_backward(error)  # noqa: B904 (the error itself, or its cause)
    losses[:] = [loss.detach() for loss in losses]


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
        optimizer: An optimizer of its parameters; None makes a twin of the pipeline's.
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
    """Makes a reference of the pipeline's own list of layers, with a twin of its optimizer.

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
    return reference
