"""The units of work of a schedule, the weights of their losses, and the values between stages.

A unit is a whole micro-batch, or a part that the schedule cuts it into. Nothing else in a batch, a
stage or a loss knows how a micro-batch is cut: they ask the :class:`Units` of the schedule. Tables
name the modules that special schedules and placements need.
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


class Borders(Protocol):
    """Translates between the values of edges and those that a stage's layers take and return."""

    def join(self, values: Values) -> Nest:
        """Returns the value that the layers of a stage take, from those of all edges into it."""

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
    """The borders of a list of layers: each stage takes the value that the one before returns."""

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


#: What makes the borders of a placement, as ``module:name``, and whether the placement has them.
BORDERS: Mapping[str, Callable[[Placement], bool]] = {
    "fleetpipe.contrib.vocabulary:HeadBorders": lambda placement: placement.has_head
}


def borders_of(placement: Placement) -> Borders:
    """Returns the borders that the stages of a placement have."""
    for make, wanted in BORDERS.items():
        if wanted(placement):
            borders: Borders = pkgutil.resolve_name(make)(placement)
            return borders
    return Chain(placement)


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
    "fleetpipe.contrib.slices:sequence_chunks": lambda of, schedule, config: (
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


#: Of the weights of places, which may be sums of many class weights.
_FINEST = 1 << 40


class MicroBatchWeights:
    """The weights of micro-batches under the options of a pipeline.

    Attributes:
        usual: The weight of each micro-batch of this replica in the replica's loss.
        in_backward: The weight of each in the loss that backward starts from: the usual one, or 1
            if ``delay_scale_loss`` divides the gradients later.
        divisor: The number by which gradients are divided after the last backward; 1 for none.
        copies: The number by which each weight is divided before a forward. With sums by a tree it
            is the number of ranks over which gradients are averaged, so that no division follows
            the sums.
        by_tokens: Whether micro-batches count by their tokens, whatever their rows.
    """

    usual: list[Fraction]
    in_backward: list[Fraction]
    copies: int
    by_tokens: bool

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
        """Returns the function that weights micro-batches: by counted places, if an option asks.

        Args:
            functions: The loss functions.
            labels: The labels of the micro-batches; None if this process computes no loss.
            weights: The weight of each micro-batch in the loss.

        Raises:
            ConfigError: What a loss function counts cannot be read.
        """
        if labels is None or not self._by_places:
            return lambda _, number: weights[number] / self.copies
        base, group = (None, self._job.copies()) if self.by_tokens else (weights, self._sequence)
        by_places = PlaceWeights(functions, labels, base, group)
        return lambda function, number: by_places.of(function, number) / self.copies

    def of_tokens(self, labels: Sequence[Nest], group: Group) -> list[Fraction] | None:
        """Returns the weights of micro-batches by their places; None if all count alike.

        Collective over ``group`` with ``loss_reduction="tokens"``; otherwise it returns None at
        once.

        Args:
            labels: The labels of whole sequences, by micro-batch.
            group: The ranks whose losses are averaged, each of which has other micro-batches.
        """
        if not self.by_tokens:
            return None
        weights = PlaceWeights(self._loss_functions(), labels, None, group)
        return [weights.of(0, number) for number in range(len(labels))]

    def counted(self, label: Nest) -> float:
        """Returns the number of places of some labels that the first loss function counts."""
        return float(places_in(self._loss_functions()[0], label).counted)


class PlaceWeights:
    """The weights of a rank's micro-batches by places, in a loss that is averaged over all copies.

    A loss is a mean over the places that it counts. The loss of a micro-batch must be the mean over
    the places of whole sequences. With ``loss_reduction="tokens"`` the loss of a batch must be the
    mean over those of all micro-batches and replicas. So each rank's part is weighted by its number
    of places.
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
            ConfigError: What a loss function counts cannot be read.
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
        # What is counted, and what it is divided by, in a message of whole numbers.
        pairs = [[(p.counted, p.mean_over or Fraction(0)) for p in row] for row in self._places]
        numbers = [
            [[n for part in pair for n in part.as_integer_ratio()] for pair in row] for row in pairs
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
        """Returns the weight of one micro-batch; ``ranks`` has what each rank counts.

        It is rounded as a part of the whole batch, so that layouts do not matter.
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
    """See :func:`counted_places.places_of`, which is loaded by those who count."""
    return pkgutil.resolve_name("fleetpipe.dygraph.batch.counted_places:places_of")(function, label)
