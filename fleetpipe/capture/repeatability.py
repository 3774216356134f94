"""Checks that a forward makes the same calls whatever the numbers, by runs on varied examples.

A capture records one run. What Python computed in that run stays fixed, as a count of calls. Runs
on other numbers show where it would differ. Since an invalid number, as an index out of range, may
end the process, the numbers are varied so: rows of the example are moved, floats scaled and mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.capture.tracing.model_snapshot import attributes_kept_between_runs
from fleetpipe.capture.tracing.signature import PLAIN, map_numbers
from fleetpipe.capture.tracing.user_lines import forward_location, raising_location
from fleetpipe.capture.tracing.value import Capture, Node, Ref, StateRef, parts
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import CaptureError, reason
from fleetpipe.paddle_api import paddle

_WHAT = "calls something else when it runs again on other numbers"


class Variation(NamedTuple):
    """A change of an example's numbers.

    Attributes:
        shift: The number of rows by which each row moves; None replaces all rows by the first.
        mixed: The fraction of the previous row that is mixed into each row of floats, from 0 to 1.
        scale: The factor by which floats are multiplied, at most 1.
    """

    shift: int | None
    mixed: float = 0.0
    scale: float = 1.0


ROLLED, MIXED = Variation(1, scale=0.75), Variation(2, mixed=0.4, scale=0.5)
#: All variations of a proof; the first one is the example itself.
ALL = (
    *(Variation(0), ROLLED, Variation(1, mixed=0.7), MIXED),
    *(Variation(0, scale=0.0), Variation(None)),
)


def vary_example(capturer: Capturer, variation: Variation) -> Nest:
    """Returns the example with varied numbers, except in the inputs of ``shape_inputs``."""
    rows = rows_of(capturer.example)
    return capturer.map_example(
        lambda tensor: map_numbers(tensor, lambda numbers: vary_numbers(numbers, variation, rows))
    )


def rows_of(example: Nest) -> int:
    """Returns the number of rows of a batch, from its first tensor that has rows; 0 without one."""
    return next((tensor.shape[0] for tensor in tensors_of(example) if tensor.ndim), 0)


def with_another_row(capturer: Capturer) -> Nest | None:
    """Returns the example with its first row repeated at the end of each tensor.

    Returns:
        The longer example; None if its tensors have different numbers of rows, since these may be
        no rows of a batch then, or if they have none.
    """
    shapes = [tensor.shape for tensor in tensors_of(capturer.example)]
    if len({shape[0] for shape in shapes if shape}) != 1 or not rows_of(capturer.example):
        return None

    def longer(tensor: Tensor) -> Tensor:
        """Returns a tensor with its first row repeated at the end."""
        if not tensor.ndim:
            return tensor
        return map_numbers(tensor, lambda numbers: np.concatenate([numbers, numbers[:1]]))

    return capturer.map_example(longer)


def vary_numbers(numbers: Any, variation: Variation, rows: int) -> Any:
    """Returns a varied copy of an input's numbers.

    Rows of integers and bools are only moved, and not even that in a monotone list, such as offsets
    of sequences.

    Args:
        numbers: The NumPy array of the input.
        variation: How the numbers are varied.
        rows: The number of rows of the batch; an array with another number is not moved.
    """
    has_rows = numbers.ndim > 0 and len(numbers) == rows > 0
    if numbers.dtype.kind in "iub":
        steps = np.diff(numbers.astype("int64")) if numbers.ndim == 1 else np.array([-1, 1])
        is_monotone = (steps >= 0).all() or (steps <= 0).all()  # as offsets of sequences
        return _move_rows(numbers, variation) if has_rows and not is_monotone else numbers
    if has_rows:
        numbers = _move_rows(numbers, variation)
        if variation.mixed:
            previous = np.roll(numbers, 1, 0)
            numbers = (1 - variation.mixed) * numbers + variation.mixed * previous
    if variation.scale:
        return numbers * variation.scale
    has_both_signs = numbers.dtype.kind == "f" and (numbers < 0).any() and (numbers > 0).any()
    return np.zeros_like(numbers) if has_both_signs else numbers


def _move_rows(rows: Any, variation: Variation) -> Any:
    """Returns an array with its rows moved by the variation's shift, or all equal to the first."""
    if variation.shift is None:
        return np.broadcast_to(rows[:1], rows.shape).copy()
    return np.roll(rows, variation.shift, 0)


class _Difference(NamedTuple):
    """The first difference between two runs of a forward.

    Attributes:
        path: The path of the layer whose forward differs; "" for the model itself.
        location: File and line of the call that differs; None if it is unknown.
        expected: A text for the call of the first run.
        got: A text for the call of the second run.
    """

    path: str
    location: str | None
    expected: str
    got: str


def require_same_calls(capturer: Capturer) -> None:
    """Runs a model's forward on other numbers, and checks that it makes the same calls.

    A sublayer whose forward makes other calls becomes a single node: its calls are not captured.

    Raises:
        CaptureError: The model's own forward makes other calls.
    """
    model = capturer.model
    layers = dict(model.named_sublayers(include_self=True))
    while True:
        # With attributes of layers kept from run to run, state that Python keeps shows.
        with attributes_kept_between_runs(model), capturer.notice_if_slow():
            difference = _find_difference_on_other_numbers(capturer)
        if difference is None:
            return
        if not difference.path:
            raise CaptureError(
                f"the forward of {type(model).__name__} {_WHAT}",
                where=difference.location,
                expected=difference.expected,
                got=difference.got,
                cause="Python computes with what depends on the numbers in a batch, on earlier "
                "calls, or on chance",
                fix="compute it by operations of Paddle's; or put that code into a sublayer: what "
                "is within one may do anything",
            )
        capturer.unopened.add(
            type(layers[difference.path]), f"its forward {_WHAT}, {difference.location}"
        )


def require_same_modes(first: Capture, again: Capture) -> None:
    """Raises an error if a forward switches layers' modes in another way each time.

    Args:
        first: A run that switches modes.
        again: A second run, which starts from the modes that the first has left.

    Raises:
        CaptureError: The runs make other calls, or leave layers in other modes.
    """
    difference = _find_first_difference(first, again)
    modes = {id(mode.layer): mode for mode in again.switched}
    modes_after = tuple(modes.get(id(mode.layer), mode) for mode in first.switched)
    if difference is not None or first.switched != modes_after:
        raise CaptureError(
            "the forward switches layers between training and evaluation, each time otherwise",
            where=first.switched_at,
            expected=difference and difference.expected,
            got=difference and difference.got,
            cause="what the first micro-batch leaves is what the second finds",
            fix="do it where modes are set: def train(self): super().train(); self.norm.eval()",
        )


def _find_difference_on_other_numbers(capturer: Capturer) -> _Difference | None:
    """Returns the first difference of runs on other numbers from the run on the example.

    Returns None if there is none, in training and in evaluation.
    """
    signature = capturer.example_signature
    # A forward that reads numbers is refused earlier, so one variation in each mode is enough.
    for training, change in ((True, ROLLED), (False, MIXED)):
        while True:
            first = capturer(signature, training)
            changes = capturer.unopened.changes
            second = _capture_varied(capturer, change, training)
            for name in _nodes_with_other_shapes(first, second):
                capturer.unopened.add_data_dependent_node(name)
            if changes == capturer.unopened.changes:
                break
        difference = _find_first_difference(first, second)
        if difference is not None:
            # A constant may be computed in its first use only: later runs decide.
            capturer.forget_captures()
            first, second = (
                capturer(signature, training),
                _capture_varied(capturer, change, training),
            )
            difference = _find_first_difference(first, second)
        if difference is not None:
            location = difference.location or forward_location(capturer.model)
            return difference._replace(location=location)
    return None


def _capture_varied(capturer: Capturer, change: Variation, training: bool) -> Capture:
    """Captures the forward on varied numbers; if it fails, on the milder ones of ``ROLLED``.

    Raises:
        CaptureError: The forward cannot be captured, or fails on the numbers of ``ROLLED`` too.
    """
    try:
        return capturer.capture_inputs(vary_example(capturer, change), training)
    except CaptureError as error:
        if not isinstance(error.__cause__, Exception):
            raise
        if change is ROLLED:
            raise CaptureError(
                f"the forward runs on the example, and fails on other numbers: "
                f"{reason(error.__cause__)}",
                where=raising_location(error.__cause__.__traceback__),
                cause="some numbers have to fit to others, as the sizes of images to their pixels",
                fix="name the small input of whole numbers that says sizes in shape_inputs; or set "
                "verify=False",
            ) from error
        return capturer.capture_inputs(vary_example(capturer, ROLLED), training)


def _nodes_with_other_shapes(first: Capture, second: Capture) -> Iterator[str]:
    """Yields the names of nodes whose outputs have another shape in the second run.

    The iteration ends at the first node at which the runs make different calls.
    """
    for node, node_again in zip(first.nodes, second.nodes):
        if node.function != node_again.function or node.makes != node_again.makes:
            return
        for value in node.makes - first.data_dependent:
            if first.specs[value].shape != second.specs[value].shape:
                yield node.name


def _find_first_difference(first: Capture, second: Capture) -> _Difference | None:
    """Returns the first difference of two runs; None if they make the same calls."""
    for node, node_again in zip_longest(first.nodes, second.nodes):
        texts = _describe_difference(node, node_again)
        if texts is not None:
            existing: Node = node_again or node
            opened = existing.scopes[:-1] if existing.is_layer else existing.scopes
            return _Difference(opened[-1].path, existing.location, *texts)
    if first.outputs != second.outputs:
        return _Difference("", None, "an output", "another output")
    return None


def _describe_difference(first: Node | None, second: Node | None) -> tuple[str, str] | None:
    """Compares two runs' nodes of the same number; None stands for a run without such a node.

    Returns:
        A text for each node; None if they make the same call.
    """
    if first is None or second is None or first.name != second.name:
        return _node_text(first), _node_text(second)
    arguments = zip_longest(_arguments(first), _arguments(second), fillvalue="nothing")
    for argument, argument_again in arguments:
        if not _are_equal(argument, argument_again):
            expected = _argument_text(argument)
            got = _argument_text(argument_again, of_second_run=True)
            return f"{first.name} with {expected}", f"{first.name} with {got}"
    if first.modes != second.modes:
        return f"{first.name} in one mode", f"{first.name} in another"
    return None


def _node_text(node: Node | None) -> str:
    """Returns the name of a node for an error; a phrase if a run has no such node."""
    return "nothing more" if node is None else node.name


def _arguments(node: Node) -> Iterator[object]:
    """Yields the path of each argument of a node, then the argument."""
    for path, leaf in parts((node.args, node.named)):
        yield path
        yield leaf


def _are_equal(first: object, second: object) -> bool:
    """Returns whether the same argument of two runs is equal in both.

    Objects that are neither tensors, arrays, plain values nor placeholders always count as equal:
    what they do shows in the outputs.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, paddle.Tensor):
        first, second = first.numpy(), second.numpy()  # type: ignore[attr-defined]
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.tobytes() == second.tobytes()
    if not isinstance(first, (*PLAIN, tuple, Ref, StateRef)):
        return True
    both_are_nan = first != first and second != second
    return first == second or both_are_nan


def _argument_text(value: object, of_second_run: bool = False) -> str:
    """Returns a text for an argument of a call; for the second run's, words such as "another"."""
    if isinstance(value, paddle.Tensor):
        return f"a constant {list(value.shape)}" + " of other numbers" * of_second_run
    if isinstance(value, Ref):
        return "another value" if of_second_run else "a value"
    return value.path if isinstance(value, StateRef) else f"{value!r}"[:60]
