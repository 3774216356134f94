"""The weights of micro-batches if ranks have different places of the same sequences.

A loss is a mean over the places that it counts. The loss of a micro-batch must be the mean over the
places of whole sequences. With ``loss_reduction="tokens"`` the loss of a batch must be the mean
over those of all micro-batches and replicas. So each rank's part is weighted by its number of
places.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.counted_places import count_places, is_sum
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle

#: Of the sums of many class weights.
_FINEST = 1 << 40


class TokenWeights:
    """The weights of a rank's micro-batches, in a loss that is averaged over all copies."""

    def __init__(
        self,
        functions: Sequence[Criterion],
        labels: Sequence[Nest],
        weights: Sequence[Fraction] | None,
        group: Group,
    ) -> None:
        """Counts the places of this rank.

        Args:
            functions: The loss functions; see ``counted_places`` for how one declares its count.
            labels: The labels of each micro-batch.
            weights: The weight of each micro-batch, of which each rank has a part; None to weight
                micro-batches by their places, too.
            group: The ranks that have the parts of one micro-batch; without weights, all copies.

        Raises:
            ConfigError: Labels are below 0, and a function does not declare whether it counts them.
        """
        self._places = [[_places(function, label) for label in labels] for function in functions]
        self._sums = [is_sum(function) for function in functions]
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
        numbers = [
            [[n for part in places for n in (part.numerator, part.denominator)] for places in row]
            for row in self._places
        ]
        everyone = self._group.all_gather(paddle.to_tensor(numbers, dtype="int64"))
        of_ranks = [
            [[_Places(Fraction(a, b), Fraction(c, d)) for a, b, c, d in row] for row in part]
            for part in (tensor.tolist() for tensor in everyone)
        ]
        return [
            [self._weight(n, [part[n] for part in of_ranks], index) for index in range(len(row))]
            for n, row in enumerate(self._places)
        ]

    def _weight(self, function: int, ranks: list[list[_Places]], index: int) -> Fraction:
        """Returns the weight of one micro-batch; ``ranks`` has the places on each rank."""
        mean_over = self._places[function][index].mean_over
        if self._base is None:
            total = sum((places.counted for row in ranks for places in row), start=Fraction(0))
            weight = mean_over / total if total else total
        elif self._sums[function]:
            weight = self._base[index]
        else:
            total = sum((row[index].mean_over for row in ranks), start=Fraction(0))
            weight = self._base[index] * (mean_over / total if total else Fraction(1, len(ranks)))
        return (weight * len(ranks)).limit_denominator(_FINEST)


class _Places(NamedTuple):
    """The numbers of places of a micro-batch.

    Attributes:
        mean_over: The number that the loss is divided by.
        counted: The number of places that have a loss.
    """

    mean_over: Fraction
    counted: Fraction


def _places(function: Any, label: Nest) -> _Places:
    places = count_places(function, label)
    if places is None:
        # Paddle 3.3's CrossEntropyLoss divides by all places where ignore_index is below 0.
        size = label.size if isinstance(label, paddle.Tensor) else 1
        ignored = getattr(function, "ignore_index", None)
        hard = ignored is not None and not getattr(function, "soft_label", False)
        left = int((label != ignored).astype("int64").sum()) if hard and size > 1 else size
        return _Places(Fraction(int(size)), Fraction(int(left)))
    return _Places(Fraction(1) if is_sum(function) else places, places)
