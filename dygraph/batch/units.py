"""The units of work of a schedule, the weights of their losses, and the values between stages.

A unit is a micro-batch, or a part of one if the schedule cuts micro-batches. Only the
:class:`Units` of the schedule know how a micro-batch is cut; batches, stages and losses ask them.
:class:`MicroBatchWeights` weights losses, and :class:`Borders` translate the values between stages.
``BORDERS`` and ``UNITS`` name the modules that special placements and schedules need.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from numbers import Rational
from typing import Any, Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.engine.stage import Values
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Edge, Placement, Schedule

#: Constructors of borders, as ``module:name``, each with a function that tells whether a placement
#: needs these borders.
BORDERS: Mapping[str, Callable[[Placement], bool]] = {
    "fleetpipe.contrib.vocabulary:HeadBorders": lambda placement: placement.has_head
}

#: ``weight_of(function, number)`` is the weight of a micro-batch, or of a unit, in a loss.
WeightOf = Callable[[int, int], Fraction]

#: Constructors of units, as ``module:name``, each with a function that takes a ``Runtime``, a
#: schedule and options, and returns the arguments of the constructor; None if the schedule does not
#: cut micro-batches into such units.
UNITS: Mapping[str, Callable[[Any, Schedule, PipelineConfig], tuple[Any, ...] | None]] = {
    "fleetpipe.contrib.slices:sequence_chunks": lambda of, schedule, config: (
        (schedule, config, of.layers, of.sequence.ranks, of.switches.delay_scale_loss)
        if schedule.slices > 1
        else None
    )
}

#: The largest denominator of a weight by places; places may be sums of many class weights.
_FINEST = 1 << 40


class Borders(Protocol):
    """Translates between the values on edges and the values that layers take and return."""

    def join(self, values: Values) -> Nest:
        """Returns the value that the layers of a stage take, from the values on its edges."""

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the value of each edge out of a stage, in order.

        Args:
            stage: The stage, any but the last.
            output: The value that its layers returned.
            labels: The labels of the micro-batch; None if this process has none.

        Raises:
            BoundaryError: The stage does not have the value of some edge.
        """


class Chain:
    """The borders of a list of layers: each stage takes the value that its predecessor returns."""

    def __init__(self, placement: Placement) -> None:
        self._edges: dict[int, list[Edge]] = {}
        for ends in placement.chain():
            self._edges.setdefault(ends[0], []).append(Edge(*ends))

    def join(self, values: Values) -> Nest:
        """Returns the value of the one edge."""
        return next(iter(values.values()))

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the output as the value of each edge."""
        return dict.fromkeys(self._edges[stage], output)


def borders_of(placement: Placement) -> Borders:
    """Builds the borders between the stages of a placement: special ones, or a chain."""
    for make, wanted in BORDERS.items():
        if wanted(placement):
            borders: Borders = pkgutil.resolve_name(make)(placement)
            return borders
    return Chain(placement)


class UnitStates:
    """The state that stages keep between the units of a micro-batch; this class keeps none.

    Units are numbered over the batch. The forwards of a micro-batch's units run in order, the
    backwards in reverse order.
    """

    def forward(self, stage: int, number: int) -> AbstractContextManager[None]:
        """Returns the context in which the layers of a stage run unit ``number``."""
        return nullcontext()

    def backward(
        self, stage: int, number: int
    ) -> AbstractContextManager[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Returns the context in which the backward of unit ``number`` runs.

        The context yields tensors and their gradients, from which the backward starts besides the
        output.
        """
        return nullcontext(((), ()))

    def release(self, stage: int, number: int) -> None:
        """Drops the state of unit ``number``; units of a micro-batch are released in reverse."""


_NOTHING_KEPT = UnitStates()


class Units:
    """Micro-batches as units. A subclass cuts each micro-batch into several units.

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
        """Returns a function that weights units, from a function that weights micro-batches.

        Raises:
            ConfigError: The micro-batches cannot be cut, or a loss function does not declare what
                it counts.
        """
        return weight_of

    def states(self) -> UnitStates:
        """Returns the states of the units of a new batch."""
        return _NOTHING_KEPT

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """Returns a context in which layers run a unit once more, to measure it.

        The context yields the values that layers keep for later units, by the layer's id. Values
        that are kept in this context are for its user only.
        """
        return nullcontext({})

    def lengths(self, value: Nest) -> list[int]:
        """Returns the number of positions of each unit of a micro-batch; empty for one unit."""
        return []

    def name(self, number: int) -> str:
        """Returns the name of a unit for messages."""
        return f"micro-batch {number}"


WHOLE = Units()


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


class MicroBatchWeights:
    """The weights of micro-batches under the options of a pipeline.

    Attributes:
        usual: The weight of each micro-batch of this replica in the replica's loss.
        in_backward: The weight of each micro-batch in the loss that starts backward: the usual
            weight, or 1 if ``delay_scale_loss`` divides the gradients later.
        divisor: The number by which gradients are divided after the last backward; 1 for none.
        copies: The number by which each weight is divided before a forward. With sums by a tree it
            is the number of ranks over which gradients are averaged, so that no division follows
            the sums.
        by_tokens: Whether micro-batches are weighted by their tokens, whatever their rows.
    """

    def __init__(
        self,
        config: PipelineConfig,
        job: Job,
        delayed: bool,
        scale: str,
        loss_functions: Callable[[], Sequence[Criterion]],
    ) -> None:
        """Computes the weights.

        Args:
            config: The options of the pipeline.
            job: The job of the model.
            delayed: Whether ``delay_scale_loss`` is on.
            scale: Whether gradients of the replicas are averaged ("avg") or added up ("sum").
            loss_functions: Returns the loss functions of the model.

        Raises:
            ConfigError: ``delay_scale_loss`` weights losses alike that count by their places.
        """
        self._job, self._delayed, self._scale = job, delayed, scale
        self._loss_functions = loss_functions
        self.by_tokens = config.loss_reduction == "tokens"
        self._sequence = job.sequence()
        self._by_places = self.by_tokens or self._sequence.ranks > 1
        if delayed and self._by_places:
            raise ConfigError(
                "delay_scale_loss weights all losses alike, and these count by their places",
                cause="sequences are split along sep or cp, or loss_reduction is 'tokens'",
                fix="leave delay_scale_loss out",
            )
        self.copies = job.copies().ranks if job.sums_by_tree and scale == "avg" else 1
        count = config.micro_batches
        self.usual = [Fraction(1, 1 if config.loss_reduction == "sum" else count)] * count
        self.in_backward = [Fraction(1)] * count if delayed else self.usual
        self.divisor = self.usual[0].denominator if delayed else 1

    @property
    def of_all_replicas(self) -> list[Fraction]:
        """The weights in backward of the micro-batches of all replicas."""
        replicas = self._job.replicas().ranks
        share = Fraction(1, replicas if self._scale == "avg" else 1)
        return [weight * share for weight in self.in_backward] * replicas

    def require(self, weights: Sequence[Fraction]) -> None:
        """Refuses a caller's weights if these options do not allow them.

        Raises:
            ConfigError: An option sets the weights already, or their number or type is wrong.
        """
        if self.by_tokens:
            raise ConfigError(
                "with loss_reduction='tokens' micro-batches count by their tokens",
                got="other weights",
                fix="leave the weights out, and fit's accumulate_grad_batches; or set "
                "loss_reduction to 'mean'",
            )
        if self._delayed:
            raise ConfigError(
                "delay_scale_loss weights all micro-batches alike, after the last backward",
                got="other weights",
                fix="leave delay_scale_loss out, or the weights",
            )
        if len(weights) != len(self.usual):
            raise ConfigError(
                "there is one weight for each micro-batch",
                expected=f"{len(self.usual)} weights (accumulate_steps)",
                got=f"{len(weights)} weights",
                fix="give each micro-batch its weight in the loss of the batch",
            )
        if not all(isinstance(weight, Rational) for weight in weights):
            raise ConfigError(
                "the weights of micro-batches are fractions",
                got=f"weights={[*weights]!r}",
                fix="give fractions.Fraction(rows, rows_of_the_batch) for each",
            )

    def weight_of(
        self,
        functions: Sequence[Criterion],
        labels: Sequence[Nest] | None,
        weights: Sequence[Fraction],
    ) -> WeightOf:
        """Returns a function that weights micro-batches; an option may weight them by their places.

        Args:
            functions: The loss functions.
            labels: The labels of the micro-batches; None if this process computes no loss.
            weights: The weight of each micro-batch in the loss.

        Raises:
            ConfigError: A loss function does not say how many places it counts.
        """
        if labels is None or not self._by_places:
            return lambda _, number: weights[number] / self.copies
        base, group = (None, self._job.copies()) if self.by_tokens else (weights, self._sequence)
        by_places = PlaceWeights(functions, labels, base, group)
        return lambda function, number: by_places.of(function, number) / self.copies

    def of_tokens(self, labels: Sequence[Nest], group: Group) -> list[Fraction] | None:
        """Returns the weights of micro-batches by their tokens; None if all have one weight.

        Collective over ``group`` with ``loss_reduction="tokens"``; with any other option it returns
        None at once.

        Args:
            labels: The labels of whole sequences, by micro-batch.
            group: The ranks whose losses are averaged; each has micro-batches of its own.
        """
        if not self.by_tokens:
            return None
        weights = PlaceWeights(self._loss_functions(), labels, None, group)
        return [weights.of(0, number) for number in range(len(labels))]

    def counted(self, label: Nest) -> float:
        """Returns how many places of some labels the first loss function counts."""
        return float(places_in(self._loss_functions()[0], label).counted)


class PlaceWeights:
    """The weights of a rank's micro-batches by the places of their labels.

    A loss is a mean over the places that it counts. If ranks split the sequences of a micro-batch,
    its loss must be the mean over the places of all parts. With ``loss_reduction="tokens"`` the
    loss of a batch must be the mean over the places of all micro-batches and replicas. So each
    rank's loss is weighted by its number of places, and then averaged over the ranks.
    """

    def __init__(
        self,
        functions: Sequence[Criterion],
        labels: Sequence[Nest],
        weights: Sequence[Fraction] | None,
        group: Group,
    ) -> None:
        """Counts the places of this rank.

        Args:
            functions: The loss functions.
            labels: The labels of each micro-batch.
            weights: The weight of each micro-batch, of which each rank has a part; None to weight
                micro-batches by their places, too.
            group: The ranks that have the parts of one micro-batch; without weights, all copies.

        Raises:
            ConfigError: A loss function does not say how many places it counts.
        """
        self._places = [[places_in(function, label) for label in labels] for function in functions]
        self._base, self._group = weights, group
        self._agreed: list[list[Fraction]] | None = None

    def of(self, function: int, micro_batch: int) -> Fraction:
        """Returns the weight of a micro-batch. The first call is collective over the group.

        Raises:
            PipelineTimeout: Another rank did not come within the limit.
        """
        if self._agreed is None:
            self._agreed = self._agree()
        return self._agreed[function][micro_batch]

    def _agree(self) -> list[list[Fraction]]:
        """Returns the weights by loss function and micro-batch, from the places of all ranks."""
        numbers = [
            [
                (*p.counted.as_integer_ratio(), *(p.mean_over or Fraction(0)).as_integer_ratio())
                for p in row
            ]
            for row in self._places
        ]
        everyone = self._group.all_gather(paddle.to_tensor(numbers, dtype="int64"))
        ranks = [
            [[(Fraction(a, b), Fraction(c, d)) for a, b, c, d in row] for row in part]
            for part in (tensor.tolist() for tensor in everyone)
        ]
        return [
            [self._weight(n, [part[n] for part in ranks], index) for index in range(len(row))]
            for n, row in enumerate(self._places)
        ]

    def _weight(
        self, function: int, ranks: list[list[tuple[Fraction, Fraction]]], index: int
    ) -> Fraction:
        """Returns the weight of micro-batch ``index`` on this rank.

        It is rounded as a part of the whole batch, so that its bits do not depend on the layout.

        Args:
            function: The number of the loss function.
            ranks: The counted places and the divisor of each micro-batch, by rank.
            index: The number of the micro-batch.
        """
        mean_over = self._places[function][index].mean_over
        if self._base is None:
            total = sum((counted for row in ranks for counted, _ in row), start=Fraction(0))
            weight = (1 if mean_over is None else mean_over) / total if total else total
        elif mean_over is None:
            weight = self._base[index]
        else:
            total = sum((row[index][1] for row in ranks), start=Fraction(0))
            weight = self._base[index] * (mean_over / total if total else Fraction(1, len(ranks)))
        return weight.limit_denominator(_FINEST) * len(ranks)


def places_in(function: Any, label: Nest) -> Any:
    """Calls :func:`counted_places.places_of`, whose module is loaded on the first call."""
    return pkgutil.resolve_name("fleetpipe.dygraph.batch.counted_places:places_of")(function, label)
