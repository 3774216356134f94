"""Counts the places of labels over which a loss is averaged, by a table of Paddle's losses.

A place is a position in the labels that has a loss of its own, such as a token of a sequence. The
table has the losses of ``paddle.nn.functional``, also as layers of ``paddle.nn`` and in a
``functools.partial`` with keywords, and counts by their options. Any other loss must have an
attribute ``counted``: ``counted(labels)`` returns the number of places over which it is averaged.
A loss without it is refused, or, if the script allows it, taken for a mean over all places.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.job.allow import Allow
from fleetpipe.job.job import current_job
from fleetpipe.job.optimizer_table import row_of
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import mean_leaves_out_below_zero
from fleetpipe.paddle_api.layer import option_of

#: Sums of class weights are rounded to multiples of 1 / _INVERSE_PRECISION, so that the order in
#: which they were added up does not matter.
_INVERSE_PRECISION = 1 << 20

_functional: Any = paddle.nn.functional
#: The options of a loss function, by the names of its keywords.
Options = Mapping[str, Any]

#: The function of ``paddle.nn.functional`` that each layer of ``paddle.nn`` calls.
_FUNCTIONS_OF_LAYERS: Mapping[str, str] = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "KLDivLoss": "kl_div",
    "SoftMarginLoss": "soft_margin_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "PoissonNLLLoss": "poisson_nll_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MultiLabelSoftMarginLoss": "multi_label_soft_margin_loss",
    "MultiMarginLoss": "multi_margin_loss",
}


class Places(NamedTuple):
    """How many places, positions in some labels that have a loss of their own, a loss counts.

    Attributes:
        mean_over: The number by which the sum over all places is divided; None if the loss is that
            sum.
        counted: The number of places that are not ignored, or the sum of their classes' weights.
    """

    mean_over: Fraction | None
    counted: Fraction

    @classmethod
    def mean(cls, number: Any) -> Places:
        """Describes a mean over ``number`` places, or over class weights with that sum, rounded."""
        counted = Fraction(round(float(number) * _INVERSE_PRECISION), _INVERSE_PRECISION)
        return cls(counted, counted)


def places_of(function: Any, label: Nest) -> Places:
    """Counts the places of some labels over which a loss function averages.

    Args:
        function: A loss function. One with an attribute ``declares`` counts like that function.
        label: The labels of a micro-batch, or of a sequence chunk or shard of one.

    Raises:
        ConfigError: The function does not say how many places it counts.
    """
    while hasattr(function, "declares"):
        function = function.declares
    if function is None:  # there are metrics alone
        return Places.mean(1)
    if hasattr(function, "counted"):
        return Places.mean(function.counted(label))
    counter, options = _counter_and_options(function)
    reduction = options.get("reduction")
    if counter is not None and reduction in ("mean", "sum") and isinstance(label, paddle.Tensor):
        places = counter(label, options)
        if places is not None:
            return places._replace(mean_over=None) if reduction == "sum" else places
    name = getattr(function, "__name__", type(function).__name__)
    job = current_job()
    (Allow() if job is None else job.allow).refuse(
        "loss",
        name,
        "parts of a batch count by the places that the loss counts in each, and it does not say "
        "how many these are",
        expected="a mean or a sum over labels by a loss of paddle.nn or paddle.nn.functional, or "
        "a function with `counted`",
        cause="loss_reduction='tokens', sequence chunks, or sequences that ranks have parts of; "
        "what is allowed counts as a mean over all places",
        fix=f"set loss.counted, where loss is this {name}, to a function that returns how many "
        "places of some labels the mean is over",
    )
    return _count_all(next(tensors_of(label)), {})


def _counter_and_options(function: Any) -> tuple[Counter | None, Options]:
    """Returns the function that counts a loss's places, and the options of the loss.

    For a loss that is not in the table of counters it returns None and no options.
    """
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        keywords, function = {**function.keywords, **keywords}, function.func
    layer = function if isinstance(function, paddle.nn.Layer) else None
    if layer is not None:
        name = _FUNCTIONS_OF_LAYERS.get(row_of({"paddle.nn": _FUNCTIONS_OF_LAYERS}, layer) or "")
    else:
        name = next((n for n in _COUNTERS if getattr(_functional, n, None) is function), None)
    if name is None:
        return None, {}
    parameters = inspect.signature(getattr(_functional, name)).parameters
    options = {n: parameter.default for n, parameter in parameters.items()}
    if layer is not None:
        options = {n: option_of(layer, n, default) for n, default in options.items()}
    return _COUNTERS[name], {**options, **keywords}


def _count_all(label: Tensor, options: Options) -> Places:
    """Counts every element of the labels: no place of a loss is ignored."""
    return Places.mean(int(label.size))


def _count_classes(label: Tensor, options: Options) -> Places | None:
    """Counts the labels that are not ignored, or adds up the weights of their classes.

    With class weights Paddle divides by their sum. Without, if ``ignore_index`` is below 0, the
    ``cross_entropy`` of Paddle 3.3 divides by all places. Soft and smoothed labels are never
    ignored.
    """
    ignored, weight = options["ignore_index"], options["weight"]
    smoothing, soft = options.get("label_smoothing", 0.0), options.get("soft_label", False)
    if soft or smoothing > 0:
        return _count_soft_labels(label, options, soft or "int" not in str(label.dtype))
    kept = label != ignored
    if weight is not None:
        classes = paddle.where(kept, label, paddle.zeros_like(label)).flatten()
        weights = paddle.gather(weight, classes) * kept.flatten().astype(weight.dtype)
        return Places.mean(weights.sum())
    counted = Fraction(int(kept.astype("int64").sum()))
    of_all = "soft_label" in options and ignored < 0 and not mean_leaves_out_below_zero()
    return Places(Fraction(int(label.size)) if of_all else counted, counted)


def _count_soft_labels(label: Tensor, options: Options, soft: bool) -> Places | None:
    """Counts soft or smoothed labels, by the weights of their classes if there are any.

    Args:
        label: Class probabilities, [.., classes], or class numbers to smooth, [..].
        options: The options of the loss.
        soft: Whether ``label`` has class probabilities.

    Returns:
        None if Paddle counts such labels in another way.
    """
    weight, smoothing = options["weight"], options["label_smoothing"]
    if soft and not smoothing and options["ignore_index"] >= 0:
        return None  # Paddle 3.3 divides by the number of label entries that differ from it
    if options["axis"] not in (-1, label.ndim - 1) and (soft or weight is not None):
        return None
    if weight is None:
        return _count_all(label[..., 0] if soft else label, options)
    if soft:
        weights = (label.astype(weight.dtype) @ weight).sum()
        places = int(label.size) // int(weight.size)
    else:
        weights = paddle.gather(weight, label.flatten()).sum()
        places = int(label.size)
    return Places.mean((1 - smoothing) * weights + smoothing * weight.mean() * places)


#: ``counter(label, options)`` counts the places of labels under the options of a loss; None if the
#: options do not determine the number.
Counter = Callable[[Tensor, Options], Places | None]
#: The counter of each loss of ``paddle.nn.functional``, on 2.6.2 and 3.3.x, with a mean or a sum.
_COUNTERS: Mapping[str, Counter] = {
    "cross_entropy": _count_classes,
    "nll_loss": _count_classes,
    **dict.fromkeys(
        (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "soft_margin_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
            *("hinge_embedding_loss", "multi_margin_loss"),
        ),
        _count_all,
    ),
    "multi_label_soft_margin_loss": lambda label, options: _count_all(label[..., 0], options),
}
