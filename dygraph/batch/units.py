"""The units of work of a schedule, the weights of losses, and the values between stages.

A unit is what one action computes: a micro-batch, or one sequence chunk of it if the schedule cuts
sequences. Units are numbered over the batch. Only the :class:`Units` of the schedule know how a
micro-batch is cut; batches, stages and losses ask them. :class:`MicroBatchWeights` weights the
losses of micro-batches, and :class:`Borders` translates between the values that layers take and
return and the values that stages exchange. ``BORDERS`` and ``UNITS`` name the modules that special
placements and schedules need.
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

#: Classes of :class:`Borders`, as ``module:name``, each with a function that returns whether a
#: placement needs it.
BORDERS: Mapping[str, Callable[[Placement], bool]] = {
    "fleetpipe.contrib.vocabulary:HeadBorders": lambda placement: placement.has_head
}

#: ``weight_of(function, number)`` is the weight of a micro-batch, or of a unit, in the loss of a
#: function; both are numbers, from 0.
WeightOf = Callable[[int, int], Fraction]

#: Functions that build :class:`Units`, as ``module:name``. Each comes with a function that takes a
#: ``Runtime``, a schedule and options, and returns the arguments to build with; None if the
#: schedule does not cut micro-batches into such units.
UNITS: Mapping[str, Callable[[Any, Schedule, PipelineConfig], tuple[Any, ...] | None]] = {
    "fleetpipe.contrib.slices:sequence_chunks": lambda of, schedule, config: (
        (schedule, config, of.layers, of.sequence.ranks, of.switches.delay_scale_loss)
        if schedule.slices > 1
        else None
    )
}

#: The largest denominator of a weight by places, to which it is rounded.
_LARGEST_DENOMINATOR = 1 << 40


class Borders(Protocol):
    """Translates between the values on edges and the values that layers take and return."""

    def join(self, values: Values) -> Nest:
        """Returns the value that the layers of a stage take, from those on the edges into it."""

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the value of each edge out of a stage, in order.

        Args:
            stage: The stage, any but the last.
            output: The value that its layers returned.
            labels: The labels of the unit; None if this process has none.

        Raises:
            BoundaryError: The stage does not have the value of some edge.
        """


class Chain:
    """The usual :class:`Borders`: each stage takes the value that the stage before returns."""

    def __init__(self, placement: Placement) -> None:
        """Stores the edges from each stage to the next one in ``placement``."""
        self._edges: dict[int, list[Edge]] = {}
        for ends in placement.chain():
            self._edges.setdefault(ends[0], []).append(Edge(*ends))

    def join(self, values: Values) -> Nest:
        """Returns the value of the one edge into the stage."""
        return next(iter(values.values()))

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the output as the value of each edge out of the stage."""
        return dict.fromkeys(self._edges[stage], output)


def borders_of(placement: Placement) -> Borders:
    """Returns the translator of values between stages: of a class in ``BORDERS``, or a chain."""
    for class_name, is_needed in BORDERS.items():
        if is_needed(placement):
            borders: Borders = pkgutil.resolve_name(class_name)(placement)
            return borders
    return Chain(placement)


class UnitStates:
    """What layers keep from one sequence chunk of a micro-batch for the next; here nothing.

    A subclass keeps keys and values of attention, for example. The forwards of a micro-batch's
    chunks run in order, the backwards in reverse order. Methods call a chunk a unit.
    """

    def forward(self, stage: int, number: int) -> AbstractContextManager[None]:
        """Returns a context in which the layers of a stage run unit ``number`` forward."""
        return nullcontext()

    def backward(
        self, stage: int, number: int
    ) -> AbstractContextManager[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Returns a context in which the backward of unit ``number`` runs in a stage.

        The context yields the kept tensors from which the backward starts, besides the output, and
        their gradients.
        """
        return nullcontext(((), ()))

    def release(self, stage: int, number: int) -> None:
        """Drops what a stage keeps for a unit; called for a micro-batch's last unit first."""


_NO_STATES = UnitStates()


class Units:
    """How micro-batches are cut into units: here not at all, by a subclass into sequence chunks.

    Attributes:
        count: The number of units of a micro-batch.
        slicing: How the sequences of a micro-batch are cut: the number of chunks, or their lengths.
    """

    count = 1
    slicing: int | tuple[int, ...] = 1

    def cut(self, batches: MicroBatches) -> MicroBatches:
        """Cuts micro-batches; returns all their units, in order.

        Raises:
            ConfigError: The micro-batches cannot be cut.
        """
        return batches

    def weight_of(
        self, functions: Sequence[Criterion], batches: MicroBatches, weight_of: WeightOf
    ) -> WeightOf:
        """Returns a function that weights units, from one that weights micro-batches.

        Args:
            functions: The loss functions.
            batches: The micro-batches before they were cut.
            weight_of: Returns the weights of micro-batches.

        Raises:
            ConfigError: The micro-batches cannot be cut, or a loss function does not declare what
                it counts.
        """
        return weight_of

    def states(self) -> UnitStates:
        """Returns an object that keeps layers' values from one unit of a new batch for the next."""
        return _NO_STATES

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """Returns a context in which layers run a unit once more, to measure them.

        The context yields the values that layers keep in it for later units, by the layer's id; no
        later unit gets these.
        """
        return nullcontext({})

    def lengths(self, value: Nest) -> list[int]:
        """Returns the sequence lengths of the units of a micro-batch; [] if it is not cut."""
        return []

    def name(self, number: int) -> str:
        """Returns the name of unit ``number`` of a batch, for messages."""
        return f"micro-batch {number}"


#: Each micro-batch is one unit.
WHOLE = Units()


def units_of(runtime: Any, schedule: Schedule, config: PipelineConfig) -> Units:
    """Returns how a pipeline cuts micro-batches into units for a schedule.

    Args:
        runtime: The ``Runtime`` of the pipeline.
        schedule: The schedule.
        config: The options of the pipeline.

    Raises:
        ConfigError: The model, or another option, does not allow these units.
    """
    for builder, arguments_of in UNITS.items():
        arguments = arguments_of(runtime, schedule, config)
        if arguments is not None:
            units: Units = pkgutil.resolve_name(builder)(*arguments)
            return units
    return WHOLE


class MicroBatchWeights:
    """The weights of micro-batches in the loss, by the options of a pipeline.

    Attributes:
        usual: The weight of each micro-batch of this replica in the replica's loss.
        in_backward: The weight of each micro-batch in the loss that starts backward: the usual
            weight, or 1 if ``delay_scale_loss`` divides the gradients later.
        divisor: The number by which gradients are divided after the last backward.
        copies: The number by which each weight is divided. With sums by a tree it is the number of
            ranks over which gradients are averaged, so that no division follows the sums;
            otherwise 1.
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
        """Computes the usual weights of micro-batches from the options.

        Args:
            config: The options of the pipeline.
            job: The job of the model.
            delayed: Whether ``delay_scale_loss`` is on.
            scale: Whether gradients of the replicas are averaged ("avg") or added up ("sum").
            loss_functions: Returns the loss functions of the model.

        Raises:
            ConfigError: ``delay_scale_loss`` is on, and losses are weighted by their tokens.
        """
        self._job, self._delayed, self._scale = job, delayed, scale
        self._loss_functions = loss_functions
        self.by_tokens = config.loss_reduction == "tokens"
        self._sequence = job.sequence()
        self._counts_places = self.by_tokens or self._sequence.ranks > 1
        if delayed and self._counts_places:
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
        """Refuses a caller's weights of micro-batches if the options do not allow them.

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
        """Returns a function that weights micro-batches: by their tokens if an option says so.

        Args:
            functions: The loss functions.
            labels: The labels of the micro-batches; None if this process computes no loss.
            weights: The weight of each micro-batch in the loss.

        Raises:
            ConfigError: A loss function does not say how many places it counts.
        """
        if labels is None or not self._counts_places:
            return lambda _, number: weights[number] / self.copies
        if self.by_tokens:
            by_places = PlaceWeights(functions, labels, None, self._job.copies())
        else:
            by_places = PlaceWeights(functions, labels, weights, self._sequence)
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
        """Returns how many positions of some labels the first loss function averages over."""
        return float(places_in(self._loss_functions()[0], label).counted)


class PlaceWeights:
    """The weights of a rank's micro-batches by the places of their labels.

    A place is a position in the labels that has a loss of its own, and a loss is a mean over the
    places that it counts. If ranks split the sequences of a micro-batch, its loss must be the mean
    over the places of all these ranks. With ``loss_reduction="tokens"`` the
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
        """Counts the places in the labels of this rank.

        Args:
            functions: The loss functions.
            labels: The labels of each micro-batch.
            weights: The weight of each micro-batch, whose sequences the ranks split; None to weight
                micro-batches by their places, too.
            group: The ranks that split the sequences of one micro-batch; without weights, all
                ranks that compute the last stage, with micro-batches of their own.

        Raises:
            ConfigError: A loss function does not say how many places it counts.
        """
        self._places = [[places_in(function, label) for label in labels] for function in functions]
        self._given_weights, self._group = weights, group
        self._weights: list[list[Fraction]] | None = None

    def of(self, function: int, micro_batch: int) -> Fraction:
        """Returns the weight of a micro-batch in the loss of a function, both by number.

        The first call is collective over the group.

        Raises:
            PipelineTimeout: Another rank did not come within the limit.
        """
        if self._weights is None:
            self._weights = self._compute_weights()
        return self._weights[function][micro_batch]

    def _compute_weights(self) -> list[list[Fraction]]:
        """Returns the weights by loss function and micro-batch. Collective over the group."""
        numbers = [
            [
                (*p.counted.as_integer_ratio(), *(p.mean_over or Fraction(0)).as_integer_ratio())
                for p in of_function
            ]
            for of_function in self._places
        ]
        everyone = self._group.all_gather(paddle.to_tensor(numbers, dtype="int64"))
        by_rank = [
            [[(Fraction(a, b), Fraction(c, d)) for a, b, c, d in row] for row in tensor.tolist()]
            for tensor in everyone
        ]
        return [
            [
                self._compute_weight(function, [of_rank[function] for of_rank in by_rank], index)
                for index in range(len(of_function))
            ]
            for function, of_function in enumerate(self._places)
        ]

    def _compute_weight(
        self, function: int, ranks: list[list[tuple[Fraction, Fraction]]], index: int
    ) -> Fraction:
        """Returns the weight of micro-batch ``index`` on this rank.

        The weight is rounded before it is multiplied by the number of ranks, so that the
        micro-batch's part of the batch does not depend on the layout of ranks.

        Args:
            function: The number of the loss function.
            ranks: For each rank and micro-batch, the ``counted`` and ``mean_over`` of its places.
            index: The number of the micro-batch.
        """
        mean_over = self._places[function][index].mean_over
        if self._given_weights is None:
            total = sum((counted for row in ranks for counted, _ in row), start=Fraction(0))
            weight = (1 if mean_over is None else mean_over) / total if total else total
        elif mean_over is None:
            weight = self._given_weights[index]
        else:
            total = sum((row[index][1] for row in ranks), start=Fraction(0))
            weight = self._given_weights[index] * (
                mean_over / total if total else Fraction(1, len(ranks))
            )
        return weight.limit_denominator(_LARGEST_DENOMINATOR) * len(ranks)


def places_in(function: Any, label: Nest) -> Any:
    """Calls :func:`counted_places.places_of`, whose module is loaded on the first call."""
    return pkgutil.resolve_name("fleetpipe.dygraph.batch.counted_places:places_of")(function, label)
