"""The stages of a captured model that a process owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.capture.cutting.auto import places
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.variants import Form, Forms
from fleetpipe.dygraph.layers.run_stage import Run
from fleetpipe.dygraph.model.owned_stages import OwnedStages
from fleetpipe.dygraph.sums.uses import Uses
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.partition import Partition
from fleetpipe.schedules import Edge


class OwnedNodes(OwnedStages):
    """Runs the nodes of these stages, by the captured run that a micro-batch looks like."""

    borders: CapturedStages

    def __init__(
        self,
        forms: Forms,
        stages: CapturedStages,
        partition: Partition,
        owned: Sequence[int],
        functions: Mapping[int, Callable[..., Nest]],
        uses: Callable[[], list[list[Tensor]]],
    ) -> None:
        """Describes the stages.

        Args:
            forms: The captured runs.
            stages: Runs the stages of the whole model.
            partition: The cut of the run of the example.
            owned: The numbers of the stages that this process owns.
            functions: The functions of their entries.
            uses: Returns the parameters and buffers of each entry of the whole model.
        """
        self._forms, self.borders, self._uses = forms, stages, uses
        self._partition, self.owned, self.functions = partition, owned, functions

    @property
    def draws_python(self) -> bool:
        """Whether nodes draw from Python's or NumPy's generators, which then need keys."""
        return self._forms.example(training=True).trace.draws

    def edges(self, training: bool) -> Sequence[Edge]:
        """Returns the edges between the stages, in training or in evaluation."""
        return self.borders.edges(training)

    def function(self, stage: int) -> Run:
        """Returns the function that runs the nodes of a stage in the current mode."""
        return self.borders.function(stage)

    def layers(self, stage: int) -> Mapping[int, Callable[..., Nest]]:
        """Returns the layers that are nodes of a stage, by the number of their first call."""
        if stage >= self._forms.stages:
            return super().layers(stage)
        return self._forms.example(training=True).layers(stage)

    def calls_of(self, stage: int, value: Nest) -> tuple[Mapping[int, Callable[..., Nest]], Nest]:
        """Returns the functions of a stage's nodes by number, and the first one's input."""
        if stage >= self._forms.stages:
            return super().calls_of(stage, value)
        form, value = self.borders.form(stage, value)
        if _names(form) != _names(self._forms.example(training=True)):
            raise ConfigError(
                "a captured model is measured with micro-batches like the example",
                where=f"stage {stage}",
                got="one for which the forward makes other calls, as without images",
                fix="give batches in which every micro-batch has what example_inputs have",
            )
        return {n: form.functions[n] for n in self._partition.range_of(stage)}, value

    def tensors(self) -> dict[int, list[Tensor]]:
        """Returns the parameters and buffers of each entry of this process, by its number.

        Tensors that no node uses in training belong to the entry of the inputs.
        """
        uses = self._uses()
        return {n: [tensor for tensor in uses[n] if has_memory(tensor)] for n in self.functions}

    def begin_uses(self, of_losses: Sequence[Tensor], shared: Collection[Tensor]) -> Uses:
        """Returns the uses of each parameter of these stages: see :class:`OwnedStages`.

        Raises:
            ConfigError: Nodes of one stage use the same parameter.
        """
        parameters = {n: [*filter(is_parameter, used)] for n, used in enumerate(self._uses())}
        return Uses(self._by_stage(parameters, of_losses), _refuse_slots, shared)

    def cut_places(self) -> tuple[int, ...]:
        """Returns the numbers of the nodes with which a later stage may begin."""
        named, _ = places(*(self._forms.example(training).trace for training in (True, False)))
        return tuple(number + 1 for number in named)


def _names(form: Form) -> list[object]:
    return [getattr(function, "__name__", None) for function in form.functions]


def _refuse_slots(number: int, parameter: Tensor) -> NoReturn:
    """Refuses a second use of a parameter by a stage whose uses are to leave gradients apart."""
    raise ConfigError(
        "with sums by a tree the uses of a tied weight leave gradients apart, and two nodes of one "
        "stage of a captured model would leave their sum",
        where=f"parameter {parameter.name}, node {number}",
        fix="cut the model between the two, make it a list of layers with SharedLayerDesc, or set "
        "fleetpipe_configs['sums'] = 'running'",
    )
