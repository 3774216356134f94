"""How many places a loss is the mean of: read from labels by a table of Paddle's losses.

A function of the table stands there with its defaults, in a ``functools.partial`` with keywords, or
as the layer of ``paddle.nn`` with its options. Any other function declares its count: its
``counted(labels)`` returns how many places of some labels its mean is over. A function that does
neither is refused, or, if the script allows it, counts as a mean over all places of the labels.
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

#: Sums of class weights are whole numbers of this part of one, so that no order of theirs matters.
_FINEST = 1 << 20

_functional: Any = paddle.nn.functional
Options = Mapping[str, Any]


class Places(NamedTuple):
    """What a loss is of some labels.

    Attributes:
        mean_over: The number that the sum over all places is divided by; None for a sum.
        counted: The number of places that have a loss, or the sum of their classes' weights.
    """

    mean_over: Fraction | None
    counted: Fraction


def places_of(function: Any, label: Nest) -> Places:
    """Returns of how many places of some labels a loss is the mean.

    Args:
        function: A loss function; one that ``declares`` another counts as that.
        label: The labels of a micro-batch, or of a part of one.

    Raises:
        ConfigError: That cannot be read.
    """
    while hasattr(function, "declares"):
        function = function.declares
    if function is None:  # there are metrics alone
        return Places(Fraction(1), Fraction(1))
    if hasattr(function, "counted"):
        declared = _fraction(function.counted(label))
        return Places(declared, declared)
    count, options = _row(function)
    reduction = options.get("reduction")
    if count is not None and reduction in ("mean", "sum") and isinstance(label, paddle.Tensor):
        places = count(label, options)
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
    return _of_all(next(tensors_of(label)), {})


def _row(function: Any) -> tuple[Count | None, Options]:
    """Returns how a loss of the table counts, with its options; None for another function."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        keywords, function = {**function.keywords, **keywords}, function.func
    layer = function if isinstance(function, paddle.nn.Layer) else None
    if layer is not None:
        name = _LAYERS.get(row_of({"paddle.nn": _LAYERS}, layer) or "")
    else:
        name = next((n for n in _COUNTS if getattr(_functional, n, _row) is function), None)
    if name is None:
        return None, {}
    parameters = inspect.signature(getattr(_functional, name)).parameters
    options = {n: parameter.default for n, parameter in parameters.items()}
    if layer is not None:
        options = {n: option_of(layer, n, default) for n, default in options.items()}
    return _COUNTS[name], {**options, **keywords}


def _of_all(label: Tensor, options: Options) -> Places:
    """Counts every number of the labels."""
    size = Fraction(int(label.size))
    return Places(size, size)


def _of_classes(label: Tensor, options: Options) -> Places | None:
    """Counts class numbers that are not ignored, by the weights of their classes if there are any.

    With weights Paddle divides by their sum; without, where ``ignore_index`` is below 0, 3.3's
    ``cross_entropy`` divides by all places. Soft labels, and smoothed ones, are never ignored.
    """
    ignored, weight = options["ignore_index"], options["weight"]
    smoothing, soft = options.get("label_smoothing", 0.0), options.get("soft_label", False)
    if soft or smoothing > 0:
        return _of_soft_labels(label, options, soft or "int" not in str(label.dtype))
    kept = label != ignored
    if weight is not None:
        classes = paddle.where(kept, label, paddle.zeros_like(label)).flatten()
        weights = paddle.gather(weight, classes) * kept.flatten().astype(weight.dtype)
        return Places(*[_fraction(weights.sum())] * 2)
    counted = Fraction(int(kept.astype("int64").sum()))
    of_all = "soft_label" in options and ignored < 0 and not mean_leaves_out_below_zero()
    return Places(Fraction(int(label.size)) if of_all else counted, counted)


def _of_soft_labels(label: Tensor, options: Options, soft: bool) -> Places | None:
    weight, smoothing = options["weight"], options["label_smoothing"]
    if soft and not smoothing and options["ignore_index"] >= 0:
        return None  # 3.3 divides by the numbers of the labels that differ from it
    if options["axis"] not in (-1, label.ndim - 1) and (soft or weight is not None):
        return None
    if weight is None:
        return _of_all(label[..., 0] if soft else label, options)
    if soft:
        weights = (label.astype(weight.dtype) @ weight).sum()
        places = int(label.size) // int(weight.size)
    else:
        weights = paddle.gather(weight, label.flatten()).sum()
        places = int(label.size)
    smoothed = (1 - smoothing) * weights + smoothing * weight.mean() * places
    return Places(*[_fraction(smoothed)] * 2)


def _fraction(value: Any) -> Fraction:
    return Fraction(round(float(value) * _FINEST), _FINEST)


#: Counts the places of labels under the options of a loss; None where that cannot be read.
Count = Callable[[Tensor, Options], Places | None]
#: What each loss of ``paddle.nn.functional`` counts, on 2.6.2 and 3.3.x, with a mean or a sum.
_COUNTS: Mapping[str, Count] = {
    "cross_entropy": _of_classes,
    "nll_loss": _of_classes,
    **dict.fromkeys(
        (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "soft_margin_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
            *("hinge_embedding_loss", "multi_margin_loss"),
        ),
        _of_all,
    ),
    "multi_label_soft_margin_loss": lambda label, options: _of_all(label[..., 0], options),
}
#: The function of each layer.
_LAYERS: Mapping[str, str] = {
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
