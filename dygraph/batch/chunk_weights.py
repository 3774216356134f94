"""How much each slice of a sequence counts in the loss of its micro-batch.

A loss is a mean over places, and that of a micro-batch is to be the mean over all its places. So a
slice counts by the places that its own mean is over: all of them, or those that the loss counts,
where it says which these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.slicing import Bounds, Slicing, bounds_of, part_of, slices_in
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import mean_leaves_out_below_zero

#: Sums of class weights are rounded to this part of one.
_FINEST = 1 << 20


def slice_shares(
    functions: Sequence[Criterion], batches: MicroBatches, slicing: Slicing, micro_batches: int
) -> list[list[Fraction]]:
    """Returns for each loss function the share of each slice in the loss of its micro-batch.

    A function says what it counts with one of these attributes, of which the first holds:

    - ``counted(labels)`` returns how many places of some labels its mean is over;
    - ``reduction == "sum"``: it is a sum, and so are those of the slices;
    - ``ignore_index``: it leaves out places with that label; ``weight``, if it is not None, has the
      weight of each class. (Paddle 3.3's ``CrossEntropyLoss`` divides by all places where that
      label is below 0 and there are no weights; it is taken as it is.)

    Any other is taken to be a mean over all places. Where nothing of a micro-batch is counted, its
    slices count by their lengths.

    Args:
        functions: The loss functions.
        batches: The micro-batches, not cut yet, as far as this rank has them.
        slicing: How they are cut.
        micro_batches: How many there are.

    Raises:
        ConfigError: Sequences that cannot be cut, or labels below 0, of which a function does not
            say whether it counts them.
    """
    parts = next((part for part in (batches.labels, batches.inputs) if part), None)
    if parts is None:
        # A rank that has neither the first stage nor the last: nobody asks it.
        slices = slices_in(slicing)
        return [[Fraction(1, slices)] * (micro_batches * slices) for _ in functions]
    cuts = [bounds_of(value, slicing, "a micro-batch") for value in parts]
    labels = batches.labels or [None] * len(cuts)
    return [
        [share for label, cut in zip(labels, cuts) for share in _shares(function, label, cut)]
        for function in functions
    ]


def _shares(function: Any, label: Nest, cut: Bounds) -> list[Fraction]:
    """Returns the shares of the slices of one micro-batch."""
    length = cut[-1][1]
    by_length = [Fraction(end - begin, length) for begin, end in cut]
    if is_sum(function):
        return [Fraction(1)] * len(cut)
    counts = [counted(function, part_of(label, *slice_)) for slice_ in cut]
    numbers = [count for count in counts if count is not None]
    total = sum(numbers)
    if len(numbers) < len(counts) or not total:
        return by_length
    return [count / total for count in numbers]


def is_sum(function: Criterion) -> bool:
    """Whether a loss function says that it adds up the losses of its places."""
    return not hasattr(function, "counted") and getattr(function, "reduction", None) == "sum"


def counted(function: Any, label: Nest) -> Fraction | None:
    """Returns how many places of a slice a loss is the mean of; None for all of them.

    Raises:
        ConfigError: Labels are below 0, and the function does not say whether it counts them.
    """
    if hasattr(function, "counted"):
        return Fraction(float(function.counted(label))).limit_denominator(_FINEST)
    if not isinstance(label, paddle.Tensor) or getattr(function, "soft_label", False):
        return None
    ignored, weight = getattr(function, "ignore_index", None), getattr(function, "weight", None)
    if ignored is None:
        if _has_negative(label):
            raise _unsaid(function)
        return None
    kept = label != ignored
    plain = isinstance(function, paddle.nn.CrossEntropyLoss) and weight is None
    if plain and ignored < 0 and not mean_leaves_out_below_zero():
        return None
    if weight is None:
        return Fraction(int(kept.astype("int64").sum()))
    classes = paddle.where(kept, label, paddle.zeros_like(label)).flatten()
    weights = paddle.gather(weight, classes) * kept.flatten().astype(weight.dtype)
    return Fraction(float(weights.sum())).limit_denominator(_FINEST)


def _has_negative(label: Tensor) -> bool:
    """Whether labels are of classes, some of which cannot be."""
    return "int" in str(label.dtype) and bool((label < 0).any())


def _unsaid(function: Any) -> ConfigError:
    name = getattr(function, "__name__", type(function).__name__)
    return ConfigError(
        "slices of a sequence count by the places that the loss counts in each, and it does not "
        "say which these are",
        where=f"the loss function {name}",
        got="labels below 0, as for places that are left out",
        fix=f"set {name}.counted to a function that returns how many places of some labels its "
        f"mean is over, or {name}.ignore_index to the label that this leaves out; or use "
        "nn.CrossEntropyLoss(ignore_index=..), which says it",
    )
