"""The single-device model, trained on the same micro-batches as the pipeline in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Callable

from fleetpipe.dygraph import PipelineLayer, PipelineOptimizer, randomness, twin_optimizer, weighted
from fleetpipe.errors import ConfigError
from fleetpipe.job import pipeline_group

LossOf = Callable[[Any, Any], Any]


class Reference:
    """A Layer that holds the whole model, and an optimizer over its parameters.

    Every rank of the pipeline has its own. Parameters and buffers go by the pipeline's names.
    """

    def __init__(
        self,
        model: Any,
        loss_of: LossOf,
        optimizer: Any,
        names: Mapping[str, str],
        stepped_here: frozenset[str] | None = None,
    ) -> None:
        """Describes the single-device side of a comparison.

        Args:
            model: The Layer.
            loss_of: ``loss_of(inputs, label)`` runs the model and gives the loss of a micro-batch.
            optimizer: Over the model's parameters.
            names: The pipeline's name of each of the model's parameters and buffers.
            stepped_here: The names that this rank's optimizer covers; the others come from the
                other ranks after each step. None: it covers all.
        """
        self.model = model
        self.names = names
        self._loss_of = loss_of
        self._optimizer = optimizer
        self._stepped_here = stepped_here

    def tensors(self) -> dict[str, Any]:
        """Returns the parameters and buffers of the model."""
        return {self.names[name]: tensor for name, tensor in self.model.state_dict().items()}

    def accumulate(
        self, inputs: Sequence[Any], labels: Sequence[Any], weights: Sequence[Fraction]
    ) -> Any:
        """Runs all micro-batches forward and backward, one after another.

        Under the keys of a batch (``randomness.keyed``) the micro-batches have theirs in order.

        Returns:
            The loss of the batch, detached; the gradients stand on the parameters.
        """
        self.model.train()
        losses = []
        keys = randomness.current()
        for number, (value, label, weight) in enumerate(zip(inputs, labels, weights)):
            if keys is not None:
                keys.micro_batch = number
            loss = weighted(self._loss_of(value, label), weight)
            loss.backward()
            losses.append(loss.detach())
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def step(self) -> None:
        """Updates the parameters and clears the gradients. Collective for a twin's optimizer."""
        self._optimizer.step()
        self._optimizer.clear_grad()
        if self._stepped_here is None:
            return
        tensors = self.tensors()
        own = {name: tensors[name].detach() for name in sorted(self._stepped_here)}
        for part in pipeline_group().all_gather(own):
            for name in part.keys() - self._stepped_here:
                tensors[name].set_value(part[name])


def of_model(pipe: PipelineLayer, model: Any, loss_of: LossOf | None, optimizer: Any) -> Reference:
    """Makes a reference of the user's own single-device model and optimizer.

    Collective over the pipeline: the model takes the pipeline's weights.

    Args:
        pipe: The pipeline's layers.
        model: A Layer with the same parameters in the same order.
        loss_of: ``loss_of(inputs, label)``; None: the pipeline's loss of ``model(inputs)``.
        optimizer: Over the model's parameters.
    """
    pipe.copy_to(model)
    return Reference(model, loss_of or _default_loss(pipe, model), optimizer, pipe.names_in(model))


def of_same_layers(pipe: PipelineLayer, optimizer: PipelineOptimizer) -> Reference:
    """Makes a reference of the pipeline's own list of layers, and a twin of its optimizer.

    Collective over the pipeline; to be called before the first step.

    Raises:
        ConfigError: The loss is trained too: both sides would add to its gradients.
    """
    if any(not p.stop_gradient for loss in pipe.loss_layers() for p in loss.parameters()):
        raise ConfigError(
            "parity with the pipeline's own layers needs a loss without trained parameters",
            fix="put what is trained into the last layer, or pass a model and a loss_of of its own",
        )
    model = pipe.single_model()
    pipe.copy_to(model)
    ours = pipe.own_parameters()
    theirs = dict(model.named_parameters())
    # A global norm of the twin's is summed in the order of the model, as the pipeline's is.
    optimizer.bind(pipe)
    twin = twin_optimizer(optimizer.wrapped, ours, theirs)
    covers_all = ours.keys() == theirs.keys()
    return Reference(
        model,
        _default_loss(pipe, model),
        twin,
        pipe.names_in(model),
        None if covers_all else frozenset(pipe.own_state()),
    )


def _default_loss(pipe: PipelineLayer, model: Any) -> LossOf:
    criterion = pipe.loss_fn()

    def loss_of(inputs: Any, label: Any) -> Any:
        output = model(inputs)
        randomness.enter_loss()
        return criterion(output, label)

    return loss_of
