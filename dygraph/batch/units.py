"""What the actions of a schedule run: whole micro-batches, or the units that it cuts them into.

Nothing else in a batch, a stage or a loss knows how a micro-batch is cut: they ask the
:class:`Units` of the schedule, which a row of ``UNITS`` makes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.schedules import Schedule

#: ``weight_of(function, number)`` is the weight of a micro-batch, or of a unit, in a loss.
WeightOf = Callable[[int, int], Fraction]


class UnitStates:
    """What stages keep from unit to unit of a micro-batch in one batch; of whole ones, nothing.

    Units are counted over the batch. Those of a micro-batch run forward in order, and backward the
    other way round.
    """

    def forward(self, stage: int, number: int) -> AbstractContextManager[None]:
        """Returns the context in which the layers of a stage run unit ``number``."""
        return nullcontext()

    def backward(
        self, stage: int, number: int
    ) -> AbstractContextManager[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Returns the context in which the backward of that unit runs.

        It gives what the backward begins from besides the output: tensors, and their gradients.
        """
        return nullcontext(((), ()))

    def release(self, stage: int, number: int) -> None:
        """Drops what a stage keeps of that unit, the last one that is left of its micro-batch."""


_NOTHING_KEPT = UnitStates()


class Units:
    """Whole micro-batches. A subclass cuts each of them into several units.

    Attributes:
        count: Units of a micro-batch.
    """

    count = 1

    def cut(self, batches: MicroBatches) -> MicroBatches:
        """Returns the units of all micro-batches, in order.

        Raises:
            ConfigError: They cannot be cut.
        """
        return batches

    def weight_of(
        self, functions: Sequence[Criterion], batches: MicroBatches, weight_of: WeightOf
    ) -> WeightOf:
        """Returns what weighs units, of what weighs the micro-batches before they are cut.

        Raises:
            ConfigError: They cannot be cut, or a loss function does not say what it counts.
        """
        return weight_of

    def states(self) -> UnitStates:
        """Returns what stages keep in one batch."""
        return _NOTHING_KEPT

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """Returns a context in which layers run the unit that runs once more, to be measured.

        It gives what they keep for later units, by the id of the layer; nobody else gets it.
        """
        return nullcontext({})

    def lengths(self, value: Nest) -> list[int]:
        """Returns how many places each unit of a micro-batch has; none of whole ones."""
        return []

    def name(self, number: int) -> str:
        """Returns the name of a unit for messages."""
        return f"micro-batch {number}"


WHOLE = Units()


#: What makes the units of a schedule, as ``module:name``, and what that is given of a ``Runtime``,
#: a schedule and options; None if the schedule does not cut so.
UNITS: Mapping[str, Callable[[Any, Schedule, PipelineConfig], tuple[Any, ...] | None]] = {
    # A search may cut sequences as soon as it has other costs, or another batch.
    "fleetpipe.contrib.slices.chunks:sequence_chunks": lambda of, schedule, config: (
        (schedule, config, of.layers, of.sequence.ranks, of.switches.delay_scale_loss)
        if schedule.slices > 1 or config.most_slices > 1
        else None
    )
}


def units_of(runtime: Any, schedule: Schedule, config: PipelineConfig) -> Units:
    """Returns how a schedule that a pipeline is to run cuts micro-batches.

    Raises:
        ConfigError: The model cannot be run so, or not beside another option.
    """
    for make, arguments_of in UNITS.items():
        arguments = arguments_of(runtime, schedule, config)
        if arguments is not None:
            units: Units = pkgutil.resolve_name(make)(*arguments)
            return units
    return WHOLE
