"""The stages of a list of layers that a process owns, and how it runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.recompute import layers_in
from fleetpipe.dygraph.batch import losses
from fleetpipe.dygraph.batch.borders import Borders
from fleetpipe.dygraph.layers import tied
from fleetpipe.dygraph.layers.entries import Entry
from fleetpipe.dygraph.layers.run_stage import Run, StageRunner
from fleetpipe.dygraph.sums.refusals import refuse_shared_with_losses
from fleetpipe.dygraph.sums.uses import Stages, Uses, parameters_of, slots_in
from fleetpipe.paddle_api.tensor import has_memory
from fleetpipe.partition import Partition
from fleetpipe.schedules import Edge


class OwnedStages:
    """Calls the layers of the stages that a process owns, and describes their borders.

    Attributes:
        owned: The numbers of these stages in the whole model.
        functions: Their layers and functions, by their numbers in the whole list.
        recomputes: Whether pieces of the stages are recomputed in backward.
        borders: The borders between the stages; None for a chain.
    """

    owned: Sequence[int]
    functions: Mapping[int, Callable[..., Nest]]
    recomputes = False
    borders: Borders | None = None
    _carried: Any = None

    def __init__(
        self,
        entries: Sequence[Entry],
        partition: Partition,
        owned: Sequence[int],
        recompute_interval: int,
        recompute: Collection[int],
    ) -> None:
        """Describes the stages; :meth:`take` sets their layers.

        Args:
            entries: The whole list of layers.
            partition: The cut into stages.
            owned: The numbers of the stages that this process owns.
            recompute_interval: As for :class:`StageRunner`.
            recompute: As for :class:`StageRunner`.
        """
        self._entries, self._partition, self.owned = entries, partition, owned
        self._recompute = recompute_interval, recompute
        self.recomputes = bool(recompute_interval)

    def take(self, functions: Mapping[int, Callable[..., Nest]], loss_fn: Any) -> None:
        """Sets the layers and functions to run from now on, by their numbers.

        Args:
            functions: The layers and functions of the stages that this process owns.
            loss_fn: The model's loss functions; one of them may need additional values from layers.
        """
        carried, loss_fns = losses.carried_in(loss_fn), losses.functions_in(loss_fn)
        self.functions = carried.carrying(functions, loss_fns) if carried else dict(functions)
        self._carried = carried
        self._runner = StageRunner(self.functions, self._partition, *self._recompute)

    @property
    def draws_python(self) -> bool:
        """Whether layers draw from Python's or NumPy's own generators, as far as is known."""
        return False

    def edges(self, training: bool) -> Sequence[Edge] | None:
        """Returns the edges between the stages, in training or evaluation; None for a chain."""
        return None

    def function(self, stage: int) -> Run:
        """Returns the function that runs the layers of a stage."""
        return self._runner.function(stage)

    def layers(self, stage: int) -> Mapping[int, Callable[..., Nest]]:
        """Returns the layers and functions of a stage, by their numbers."""
        return {index: self.functions[index] for index in self._partition.range_of(stage)}

    def calls_of(self, stage: int, value: Nest) -> tuple[Mapping[int, Callable[..., Nest]], Nest]:
        """Returns the layers to run in a stage for a value, and the first one's argument.

        Args:
            stage: The number of the stage in the whole model.
            value: What came to it: for stage 0 the inputs of a micro-batch.
        """
        return self.layers(stage), value

    def value_of(self, output: Nest) -> Nest:
        """Returns an output of a layer without the values added for a loss function."""
        return output if self._carried is None else self._carried.value_of(output)

    def tensors(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers of each layer, by its number."""
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
        """Separates the gradients of each use of a parameter of these stages, for a batch.

        Args:
            of_losses: The parameters of the loss functions.
            shared: The parameters that other ranks of the pipeline use too.
        """
        self._runner.uses = Uses(
            self._by_stage({n: parameters_of(f) for n, f in self.functions.items()}, of_losses),
            lambda number, parameter: slots_in(self.functions[number], parameter),
            shared,
        )
        return self._runner.uses

    def _by_stage(
        self, parameters: Mapping[int, Sequence[Tensor]], of_losses: Sequence[Tensor]
    ) -> Stages:
        """Returns the parameters of entries by stage; those of losses are at the last."""
        range_of, boundaries = self._partition.range_of, self._partition.boundaries
        stages = {stage: {n: parameters[n] for n in range_of(stage)} for stage in self.owned}
        last = stages.get(len(boundaries) - 2)
        if last is not None:
            refuse_shared_with_losses(last, of_losses)
            last[boundaries[-1]] = of_losses
        return stages

    def cut_places(self) -> tuple[int, ...] | None:
        """Returns the layers at which a stage may begin, without the first; None for all."""
        return tied.places(self._entries)
