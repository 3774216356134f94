"""The number of places that a loss is the mean of, as the loss function declares it.

The first of these attributes that a function has decides:

- ``counted(labels)`` returns how many places of some labels its mean is over;
- ``reduction == "sum"``: the loss is a sum, and so are the losses of parts of a micro-batch;
- ``ignore_index``: places with that label are left out; ``weight``, if it is not None, has the
  weight of each class. (Paddle 3.3's ``CrossEntropyLoss`` divides by all places if that label is
  below 0 and there are no weights; the count follows it.)

A function without any of them counts as a mean over all places.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import mean_leaves_out_below_zero

#: Sums of class weights are rounded to this part of one.
_FINEST = 1 << 20


def is_sum(function: Criterion) -> bool:
    """Whether a loss function declares that it adds up the losses of its places."""
    return not hasattr(function, "counted") and getattr(function, "reduction", None) == "sum"


def count_places(function: Any, label: Nest) -> Fraction | None:
    """Returns how many places of some labels a loss is the mean of; None for all of them.

    Raises:
        ConfigError: Labels are below 0, and the function does not declare whether it counts them.
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
    """Whether labels are class numbers, and some of them are below 0."""
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
