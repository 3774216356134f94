"""Runs the stages of a list of layers that a process owns, in training or evaluation mode.

:class:`OwnedStages` runs them. The functions switch a model between training and evaluation mode,
and respect the modes that a script has set: the mode that it has set last for a layer, or for the
whole model by ``train()``, is the layer's mode in training batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableSet, Sequence
from typing import Any
from weakref import WeakSet

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.dygraph.batch import losses
from fleetpipe.dygraph.batch.units import Borders
from fleetpipe.dygraph.layers import tied
from fleetpipe.dygraph.layers.entries import Entry
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.sums import (
    ParametersByStage,
    Uses,
    find_in_layers,
    parameters_of,
    refuse_shared_with_losses,
)
from fleetpipe.paddle_api.tensor import has_memory
from fleetpipe.partition import Partition
from fleetpipe.schedules import Edge

#: Layers that stay in evaluation mode in training batches.
_stays_in_evaluation: MutableSet[Layer] = WeakSet()
#: Layers that the script has put into training mode while their model is in evaluation mode.
_switched_to_training: MutableSet[Layer] = WeakSet()


def record_modes(model: Layer) -> None:
    """Records the modes that the script has set for layers of a model since the last call."""
    layers = model.sublayers(include_self=True)
    if vars(model).get("training") is False:
        # The script called eval() of the model or of a layer around it.
        _forget_evaluation(layers)
    for layer in layers:
        mode = vars(layer).get("training")
        if mode is None:
            continue
        if model.training:
            _switched_to_training.discard(layer)
            if mode:
                _stays_in_evaluation.discard(layer)
            else:
                _stays_in_evaluation.add(layer)
        elif mode:
            _switched_to_training.add(layer)
        else:
            if layer in _switched_to_training:
                _switched_to_training.discard(layer)
            else:
                _stays_in_evaluation.add(layer)
            _forget_evaluation([layer])


def needs_switch(model: Layer) -> bool:
    """Whether a model, or a layer of it, is in evaluation mode and must be switched to training."""
    layers = model.sublayers()
    return not model.training or not all("training" in vars(layer) for layer in layers)


def switch_to_evaluation(model: Layer, switch: Callable[[], object]) -> None:
    """Puts a model into evaluation mode, after it has recorded the script's modes.

    Args:
        model: The model.
        switch: Puts all layers of the model into evaluation mode.
    """
    record_modes(model)
    layers = model.sublayers(include_self=True)
    for layer in layers:
        if layer in _switched_to_training:
            _switched_to_training.discard(layer)
            _stays_in_evaluation.discard(layer)
    switch()
    _forget_evaluation(layers)


def switch_to_training(model: Layer, switch: Callable[[], object]) -> None:
    """Puts a model into training mode, but leaves layers in the modes that the script has set.

    Args:
        model: The model.
        switch: Puts all layers of the model into training mode.
    """
    record_modes(model)
    modes = {
        layer: layer in _switched_to_training
        for layer in model.sublayers()
        if layer in _switched_to_training or layer in _stays_in_evaluation
    }
    switch()
    for layer, mode in modes.items():
        layer.training = mode


def modes_in_training_batches(model: Layer) -> list[tuple[str, bool]]:
    """Returns the path of each layer, and whether training batches run it in training mode."""
    record_modes(model)
    return [
        (path, layer in _switched_to_training or layer not in _stays_in_evaluation)
        for path, layer in model.named_sublayers()
    ]


def _forget_evaluation(layers: Iterable[Layer]) -> None:
    """Removes ``training`` from layers in evaluation mode, to notice if a script sets it."""
    for layer in layers:
        if not layer.training:
            layer.__dict__.pop("training", None)


class OwnedStages:
    """Runs the layers of the stages that a process owns.

    Attributes:
        owned: The numbers of the stages in the whole model.
        functions: The layers and functions of the stages, by their numbers in the whole list.
        recomputes: Whether pieces of the stages are recomputed in backward.
        borders: Translates between the values of layers and those on edges; None for a list of
            layers, each of which takes what the one before returns.
    """

    owned: Sequence[int]
    functions: Mapping[int, Callable[..., Nest]]
    recomputes = False
    borders: Borders | None = None
    _loss_with_extra_values: Any = None

    def __init__(
        self,
        entries: Sequence[Entry],
        partition: Partition,
        owned: Sequence[int],
        recompute_interval: int,
        recompute: Collection[int],
    ) -> None:
        """Describes the stages; :meth:`set_layers` sets their layers.

        Args:
            entries: The whole list of layers.
            partition: The cut into stages.
            owned: The numbers of the stages that this process owns.
            recompute_interval: The number of layers of a recomputed piece; 0 for none.
            recompute: The numbers of layers that are recomputed one by one, if there is no
                interval.
        """
        self._entries, self._partition, self.owned = entries, partition, owned
        self._recompute = recompute_interval, recompute
        self.recomputes = bool(recompute_interval)

    def set_layers(self, functions: Mapping[int, Callable[..., Nest]], loss_fn: Any) -> None:
        """Sets the layers and functions to run from now on.

        Args:
            functions: The layers and functions of the stages that this process owns, by number.
            loss_fn: The model's loss function, or a list of them. One may take extra values of the
                layers beside the output, such as the auxiliary losses of experts: the layers then
                carry these values on to the last stage.
        """
        loss = losses.find_loss_with_extra_values(loss_fn)
        loss_fns = losses.functions_in(loss_fn)
        self.functions = loss.carrying(functions, loss_fns) if loss else dict(functions)
        self._loss_with_extra_values = loss
        self._runner = StageRunner(self.functions, self._partition, *self._recompute)

    @property
    def draws_python(self) -> bool:
        """Whether layers are known to draw from Python's or NumPy's own generators."""
        return False

    def edges(self, training: bool) -> Sequence[Edge] | None:
        """Returns the edges between stages; None for a chain.

        In a chain each stage takes what the one before returns.

        Args:
            training: Whether the edges are those of a training batch, or of an evaluation.
        """
        return None

    def function(self, stage: int) -> Run:
        """Returns the function that runs the layers of a stage."""
        return self._runner.function(stage)

    def layers(self, stage: int) -> Mapping[int, Callable[..., Nest]]:
        """Returns the layers and functions of a stage, by their numbers."""
        return {index: self.functions[index] for index in self._partition.range_of(stage)}

    def calls_of(self, stage: int, value: Nest) -> tuple[Mapping[int, Callable[..., Nest]], Nest]:
        """Returns the layers that a stage runs, by number, and the argument of the first of them.

        Args:
            stage: The global number of the stage.
            value: What the stage receives; stage 0, the inputs of a micro-batch.
        """
        return self.layers(stage), value

    def value_of(self, output: Nest) -> Nest:
        """Returns an output of the last layer, without the extra values for a loss function."""
        return (
            output
            if self._loss_with_extra_values is None
            else self._loss_with_extra_values.value_of(output)
        )

    def tensors(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers of each layer, if in memory, by the layer's number."""
        return {
            number: [
                tensor
                for layer in layers_in(function)
                for tensor in (*layer.parameters(), *layer.buffers())
                if has_memory(tensor)
            ]
            for number, function in self.functions.items()
        }

    def begin_uses(self, of_losses: Sequence[Tensor], shared: Collection[Tensor]) -> Uses:
        """Gives each use of a parameter its own gradient for one batch, to be added up by a tree.

        A use is one layer's, or the loss functions', of one parameter of these stages.

        Args:
            of_losses: The parameters of the loss functions.
            shared: The parameters that other ranks of the pipeline use too.
        """
        self._runner.uses = Uses(
            self._by_stage({n: parameters_of(f) for n, f in self.functions.items()}, of_losses),
            lambda number, parameter: find_in_layers(self.functions[number], parameter),
            shared,
        )
        return self._runner.uses

    def _by_stage(
        self, parameters: Mapping[int, Sequence[Tensor]], of_losses: Sequence[Tensor]
    ) -> ParametersByStage:
        """Returns the parameters of layers by stage; the losses count as a layer of the last stage.

        Args:
            parameters: The parameters of each layer, by number.
            of_losses: The parameters of the loss functions.
        """
        range_of, boundaries = self._partition.range_of, self._partition.boundaries
        stages = {stage: {n: parameters[n] for n in range_of(stage)} for stage in self.owned}
        last = stages.get(len(boundaries) - 2)
        if last is not None:
            refuse_shared_with_losses(last, of_losses)
            last[boundaries[-1]] = of_losses
        return stages

    def cut_places(self) -> tuple[int, ...] | None:
        """Returns the layers, except layer 0, at which a stage may begin; None for all layers."""
        return tied.first_layers_of_stages(self._entries)
