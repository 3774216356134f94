"""The units of work of a schedule: whole micro-batches, or the parts that it cuts them into.

Nothing else in a batch, a stage or a loss knows how a micro-batch is cut: they ask the
:class:`Units` of the schedule, which an entry of ``UNITS`` makes.
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
    """The state that stages keep between the units of a micro-batch; none for whole ones.

    Units are numbered over the batch. The forwards of a micro-batch's units run in order, the
    backwards in reverse order.
    """

    def forward(self, stage: int, number: int) -> AbstractContextManager[None]:
        """Returns the context in which the layers of a stage run unit ``number``."""
        return nullcontext()

    def backward(
        self, stage: int, number: int
    ) -> AbstractContextManager[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Returns the context in which the backward of that unit runs.

        It yields tensors and their gradients, from which the backward starts besides the output.
        """
        return nullcontext(((), ()))

    def release(self, stage: int, number: int) -> None:
        """Drops the state of that unit, the last one of its micro-batch that is left."""


_NOTHING_KEPT = UnitStates()


class Units:
    """Whole micro-batches. A subclass cuts each of them into several units.

    Attributes:
        count: The number of units of a micro-batch.
        slicing: How the sequences of a micro-batch are cut: the number of chunks, or their lengths.
    """

    count = 1
    slicing: int | tuple[int, ...] = 1

    def cut(self, batches: MicroBatches) -> MicroBatches:
        """Returns the units of all micro-batches, in order.

        Raises:
            ConfigError: The micro-batches cannot be cut.
        """
        return batches

    def weight_of(
        self, functions: Sequence[Criterion], batches: MicroBatches, weight_of: WeightOf
    ) -> WeightOf:
        """Returns the function that weights units, from the one that weights micro-batches.

        Raises:
            ConfigError: The micro-batches cannot be cut, or a loss function does not declare what
                it counts.
        """
        return weight_of

    def states(self) -> UnitStates:
        """Returns a new state for one batch."""
        return _NOTHING_KEPT

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """Returns a context in which layers run a unit once more, to measure it.

        It yields the values that layers keep for later units, by the layer's id; other code never
        gets them.
        """
        return nullcontext({})

    def lengths(self, value: Nest) -> list[int]:
        """Returns how many places each unit of a micro-batch has; empty for whole ones."""
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
    """Returns the units into which a pipeline cuts micro-batches for a schedule.

    Raises:
        ConfigError: The model, or another option, does not allow these units.
    """
    for make, arguments_of in UNITS.items():
        arguments = arguments_of(runtime, schedule, config)
        if arguments is not None:
            units: Units = pkgutil.resolve_name(make)(*arguments)
            return units
    return WHOLE
