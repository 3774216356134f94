"""Computes the losses of a batch: each loss function on each micro-batch, weighted and summed.

A user may give one loss function, a list, or none. A loss function that runs on another rank cannot
read tensors that layers store on this rank, such as auxiliary losses in a list:
:func:`tensors_read_by` finds such tensors. Start with :class:`Losses`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import gradients
from fleetpipe.dygraph.function_code import (
    closure_values,
    codes_in,
    is_of_library,
    names_in,
    variables_of,
)
from fleetpipe.dygraph.nest import needs_gradient, outline
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError, reason
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import rehearsal_dtype
from fleetpipe.paddle_api.layer import buffers_in, sublayers_in
from fleetpipe.paddle_api.tensor import NoNumbersError

#: ``criterion(output, label)`` gives a Tensor with one element.
Criterion = Callable[[Nest, Nest], Tensor]

#: Words of Paddle's messages about a tensor without memory.
_WITHOUT_MEMORY = ("holder_ should not be null", "> memory_size():0")

#: How messages name the loss function itself; the paths of what it refers to begin with it.
_LOSS = "loss_fn"

#: A list or dict with more entries is data, or a vocabulary, and is not searched.
_MOST_ITEMS = 1000


def functions_in(loss_fn: Any) -> list[Any]:
    """Returns the ``loss_fn`` of a model as a list of loss functions; [None] without a loss."""
    return list(loss_fn) if isinstance(loss_fn, (list, tuple)) else [loss_fn]


def require_functions(loss_fn: Any) -> None:
    """Refuses a ``loss_fn`` that cannot be called, before it fails on the last rank alone."""
    for function in functions_in(loss_fn):
        is_class = isinstance(function, type)
        if function is not None and (is_class or not callable(function)):
            raise ConfigError(
                "loss_fn is called with the model's output and the label",
                expected="a function or a built layer, or a list of these",
                got=f"the class {function.__name__}" if is_class else repr(function),
                fix=f"pass {function.__name__}()" if is_class else "pass nn.CrossEntropyLoss()",
            )


def required_functions(loss_fn: Any) -> list[Criterion]:
    """Returns the loss functions of ``loss_fn``; raises a ``ConfigError`` if there is none."""
    functions = functions_in(loss_fn)
    if not functions or None in functions:
        raise ConfigError(
            "this PipelineLayer has no loss function", fix="pass loss_fn= when you build it"
        )
    return functions


def find_loss_with_extra_values(loss_fn: Any) -> Any:
    """Returns the first loss function that takes extra values of the layers; None if none does.

    An example is a loss with the auxiliary losses of experts. Its method ``carrying(layers,
    loss_fns)`` returns layers, by number, that add the extra values to their outputs. Its method
    ``value_of(output)`` returns an output without the extra values.
    """
    functions = functions_in(loss_fn)
    return next((one for one in functions if hasattr(type(one), "carrying")), None)


class Losses:
    """Computes the losses of the micro-batches of one batch, and adds them up."""

    def __init__(
        self,
        functions: Sequence[Criterion],
        weights: Sequence[Fraction],
        chosen: int = 0,
        delayed: bool = False,
        weight_of: Callable[[int, int], Fraction] | None = None,
        units: int = 1,
        by_tree: bool = False,
    ) -> None:
        """Creates an object that has computed no loss yet.

        Args:
            functions: Each ``function(output, label)`` gives a Tensor with one element.
            weights: The weight of each micro-batch in the batch's loss.
            chosen: The number of the function whose loss backward starts from.
            delayed: Whether backward starts from the loss without its weight, and the caller
                weights all gradients afterwards (``delay_scale_loss``).
            weight_of: ``weight_of(function, micro_batch)`` returns the weight of a micro-batch in
                the loss of a function, both by number; None to use ``weights``.
            units: The number of sequence chunks into which a micro-batch is cut. If it is more than
                1, methods and ``weight_of`` take the number of a chunk in the batch wherever they
                say micro-batch.
            by_tree: Whether the losses of micro-batches are added by a tree, not one after another.
        """
        self._units = units
        self._by_tree = by_tree
        self.functions = functions
        self._weights = weights
        self._weight_of = weight_of or (lambda _, index: weights[index])
        self._chosen = chosen
        self._weights_later = delayed
        #: Called once :meth:`take` was called for all micro-batches.
        self.complete: Callable[[], None] | None = None
        #: For each function, the losses by micro-batch, weighted unless that is delayed.
        self._weighted_losses: list[dict[int, Tensor]] = [{} for _ in functions]

    def take(self, index: int, output: Nest, label: Nest) -> Tensor:
        """Computes all losses of micro-batch ``index``; returns the one that starts backward.

        Raises:
            BoundaryError: A loss function cannot take the values, or returns something else.
        """
        start = None
        for number, function in enumerate(self.functions):
            loss = _call_loss(function, output, label)
            if not self._weights_later:
                loss = weighted(loss, self._weight_of(number, index))
            self._weighted_losses[number][index] = loss.detach()
            if number == self._chosen:
                start = loss
        count = len(self._weights) * self._units
        if self.complete is not None and len(self._weighted_losses[0]) == count:
            self.complete()
        return start

    def totals(self) -> list[Tensor]:
        """Returns the batch's loss for each function, detached, in the function's shape and dtype.

        The losses are added up in the order of the micro-batches, whatever order these ran in.
        """
        totals = []
        for by_number in self._weighted_losses:
            in_order = [by_number[index] for index in sorted(by_number)]
            if self._by_tree:
                total = tree(in_order, operator.add)
            else:
                total = functools.reduce(operator.add, in_order)
            totals.append(weighted(total, self._weights[0]) if self._weights_later else total)
        return totals

    def by_micro_batch(self) -> list[Tensor]:
        """Returns the losses of the micro-batches: a Tensor [micro-batches] for each function.

        The losses are weighted, unless the caller weights gradients later.
        """
        stacked = [
            paddle.stack([by_number[index].reshape([]) for index in sorted(by_number)])
            for by_number in self._weighted_losses
        ]
        if self._units == 1:
            return stacked
        return [losses.reshape([-1, self._units]).sum(axis=1) for losses in stacked]

    def __bool__(self) -> bool:
        return bool(self._weighted_losses[0])


def weighted(loss: Tensor, weight: Fraction) -> Tensor:
    """Returns what a micro-batch adds to the batch's loss: ``loss * weight``."""
    # A quotient, not a product with 1/m: this is what a hand-written accumulation loop does,
    # and the two differ in the last bit where m is not a power of two.
    if weight.numerator != 1:
        loss = loss * weight.numerator
    if weight.denominator != 1:
        loss = loss / weight.denominator
    return loss


def _call_loss(criterion: Criterion, output: Nest, label: Nest) -> Tensor:
    """Calls a loss function on a micro-batch; refuses a result that is no Tensor with one element.

    Raises:
        BoundaryError: The function fails, or returns something else.
    """
    try:
        loss = criterion(output, label)
    except NoNumbersError as error:
        raise _loss_error(error, output, label) from error
    except (FleetPipeError, MemoryError):
        # A collective within the loss has failed; the arguments of the loss are not to blame.
        raise
    except Exception as error:
        raise _loss_error(error, output, label) from error
    # Not loss.size: Paddle asks NumPy for that, which takes as long as the loss of a small model.
    if isinstance(loss, paddle.Tensor) and math.prod(loss.shape) == 1:
        half = loss.dtype == paddle.float16
        if half and loss.place.is_cpu_place() and rehearsal_dtype() is None:
            raise BoundaryError(
                "the losses of micro-batches are added up, and Paddle adds no float16 on a CPU",
                where="last stage",
                got=outline(loss),
                fix='return loss.astype("float32") from loss_fn',
            )
        return loss
    raise BoundaryError(
        "loss_fn(output, label) must return a Tensor with one element",
        where="last stage",
        got=outline(loss) if isinstance(loss, paddle.Tensor) else type(loss).__name__,
        fix="reduce the loss, e.g. with paddle.mean",
    )


def _loss_error(error: Exception, output: Nest, label: Nest) -> BoundaryError:
    """Returns the error to raise if a loss function failed with ``error``."""
    if gradients.is_raised_in_paddle_grad(error):
        return gradients.grad_across_stages_error(error, "the loss function", output)
    has_no_memory = any(text in str(error) for text in _WITHOUT_MEMORY)
    if isinstance(error, NoNumbersError) or has_no_memory:
        return BoundaryError(
            "the loss function uses a parameter that lies on another rank",
            where="last stage",
            cause="it is a method of the model, or refers to one of its layers",
            fix="compute with the parameter in the model's forward, and return what the loss "
            "takes; or make the loss a Layer with parameters of its own",
        )
    head = "; behind a VocabularyHead, one that begins with vocabulary_cross_entropy"
    return BoundaryError(
        "the loss function cannot take the model's output and the label",
        where="last stage",
        got=f"output {outline(output)}; label {outline(label)}",
        cause=reason(error),
        fix="give labels of the shape and dtype that loss_fn(output, label) takes, or another "
        "loss_fn" + head * isinstance(output, tuple),
    )


def may_read(function: Any) -> bool:
    """Whether a loss function may read tensors that layers store; Paddle's own losses do not.

    The answer depends only on the function's code, so callers need it only once a batch.
    """
    if is_of_library(type(function)):
        function = getattr(function, "declares", function)
    return not str(getattr(function, "__module__", "")).startswith("paddle.")


def require_nothing_kept(functions: Iterable[Any], stage: int) -> None:
    """Refuses tensors that layers of ``stage`` store for loss functions on another rank."""
    for function in functions:
        path, tensor = next(tensors_read_by(function), ("", None))
        if tensor is not None:
            raise BoundaryError(
                "the loss function reads a tensor that a layer keeps here, and it runs on the rank "
                "of the last stage",
                where=f"stage {stage}",
                expected="a loss of the model's output and the label alone",
                got=f"{path}: {outline(tensor)}, with a gradient",
                cause="a layer appends an auxiliary loss to a list, or keeps it in an attribute",
                fix="return the tensor with the output, (output, kept), and have the layers behind "
                "hand it on to the loss, as the second entry of its first argument",
            )


def tensors_read_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields path and value of each tensor, computed by layers, that a loss function can read."""
    if not may_read(function):
        return
    names: set[str] = set()
    number_before, reached = -1, list(_reachable(function, names))
    # The search follows attributes that the code names, and these may hold code with more names.
    while names and number_before < len(names):
        number_before, reached = len(names), list(_reachable(function, names))
    for path, value in reached:
        if isinstance(value, paddle.Tensor) and needs_gradient(value) and not value.is_leaf:
            yield path, value


def _reachable(function: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each object that a loss function can reach.

    Args:
        function: The loss function.
        names: The names of the attributes to follow. The names in the code of the objects are
            added to it.
    """
    seen: set[int] = set()
    stack = [(_LOSS, function)]
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        stack += _iterate_parts(path, value, names)


def _iterate_parts(path: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields path and value of each item, closure and named attribute of an object."""
    if isinstance(value, (list, tuple, set, deque, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{path}[{key!r}]", item) for key, item in items if len(value) <= _MOST_ITEMS)
    elif isinstance(value, functools.partial):
        yield from ((path, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((path, part) for part in (value.__func__, value.__self__))
    elif isinstance(value, FunctionType):
        yield path, closure_values(value)
        if not is_of_library(value):
            names |= _names_and_strings_in(value.__code__)
            yield from variables_of(value).items()
    elif isinstance(value, ModuleType):
        if not is_of_library(value.__name__):
            yield from (
                (f"{path}.{name}", vars(value)[name]) for name in names & vars(value).keys()
            )
    elif hasattr(value, "__dict__") and not isinstance(value, (type, paddle.Tensor)):
        layer = isinstance(value, paddle.nn.Layer)
        # A loss may use the weights of a model, whose own methods are no part of the loss.
        called = path == _LOSS or not (layer and value.parameters())
        methods = {"__call__", "forward", *names} if called else names
        functions = (getattr(type(value), name, None) for name in methods)
        yield from ((path, method) for method in functions if isinstance(method, FunctionType))
        if path == _LOSS and is_of_library(type(value)):
            # A layer of a library may contain the user's loss.
            inner = [*vars(value).values(), *(sublayers_in(value).values() if layer else ())]
            yield from ((path, part) for part in inner if callable(part))
        owners = value.named_sublayers(path, True) if layer else [(path, value)]
        for owner_path, owner in owners:
            tables = (vars(owner), buffers_in(owner)) if layer else (vars(owner),)
            for table in tables:
                yield from ((f"{owner_path}.{name}", table[name]) for name in names & table.keys())
        if layer:
            sublayers = sublayers_in(value)
            yield from ((f"{path}.{name}", sublayers[name]) for name in names & sublayers.keys())


@functools.cache
def _names_and_strings_in(code: CodeType) -> frozenset[str]:
    """Returns the names in a function's code, and its strings, which ``getattr`` may take."""
    constants = chain.from_iterable(inner.co_consts for inner in codes_in(code))
    return names_in(code).union(value for value in constants if isinstance(value, str))
