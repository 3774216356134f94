"""The weights of the micro-batches of a batch in its loss."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from fractions import Fraction

from fleetpipe.aliases import Nest
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.units import WeightOf
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group


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
        self._sequence = job.along("sep", "cp")
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
            ConfigError: An option sets the weights already, or their number is wrong.
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
            ConfigError: A loss function does not declare what it counts.
        """
        if labels is None or not self._by_places:
            return lambda _, number: weights[number] / self.copies
        if self.by_tokens:
            weight_of = _token_weights(functions, labels, None, self._job.copies())
        else:
            weight_of = _token_weights(functions, labels, weights, self._sequence)
        return lambda function, number: weight_of(function, number) / self.copies

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
        weight_of = _token_weights(self._loss_functions(), labels, None, group)
        return [weight_of(0, number) for number in range(len(labels))]


def _token_weights(
    functions: Sequence[Criterion],
    labels: Sequence[Nest],
    weights: Sequence[Fraction] | None,
    group: Group,
) -> WeightOf:
    functions = [getattr(function, "declares", function) for function in functions]
    make = pkgutil.resolve_name("fleetpipe.dygraph.batch.token_weights:TokenWeights")
    weight_of: WeightOf = make(functions, labels, weights, group).of
    return weight_of
