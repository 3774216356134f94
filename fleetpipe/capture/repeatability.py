"""Checks that a forward makes the same calls whatever the numbers, by runs on varied examples.

A capture records one run, and values that Python computed in that run stay fixed, as a count of
calls. Runs on other numbers show such places. Since an invalid number, as an index out of range,
may end the process, rows of the example are moved, and floats are scaled and mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.model_snapshot import attributes_running_on
from fleetpipe.capture.tracing.signature import PLAIN, with_numbers
from fleetpipe.capture.tracing.user_lines import forward_place, raised_at
from fleetpipe.capture.tracing.value import Capture, Node, Owned, Ref, parts
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import CaptureError, reason
from fleetpipe.paddle_api import paddle

_WHAT = "calls something else when it runs again on other numbers"


class Variation(NamedTuple):
    """A change of an example's numbers.

    Attributes:
        shift: By how many rows each row moves; None replaces all rows by the first.
        mixed: The share of the row before in each row of floats.
        scale: The factor of floats, at most 1.
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


def vary_example(capturing: Capturing, variation: Variation) -> Nest:
    """Returns the example with varied numbers, except in inputs whose numbers the forward reads."""
    rows = rows_of(capturing.example)
    return capturing.vary(
        lambda tensor: with_numbers(tensor, lambda numbers: vary_numbers(numbers, variation, rows))
    )


def rows_of(example: Nest) -> int:
    """Returns the number of rows of a batch, from its first tensor that has an axis; else 0."""
    return next((tensor.shape[0] for tensor in tensors_of(example) if tensor.ndim), 0)


def with_another_row(capturing: Capturing) -> Nest | None:
    """Returns the example with its first row repeated at the end of each tensor.

    Returns None if tensors have different numbers of rows, which may be no rows of a batch then.
    """
    shapes = [tensor.shape for tensor in tensors_of(capturing.example)]
    if len({shape[0] for shape in shapes if shape}) != 1 or not rows_of(capturing.example):
        return None

    def longer(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return with_numbers(tensor, lambda numbers: np.concatenate([numbers, numbers[:1]]))

    return capturing.vary(longer)


def vary_numbers(numbers: Any, variation: Variation, rows: int) -> Any:
    """Returns varied numbers of a NumPy array, in a batch of ``rows`` rows."""
    has_rows = numbers.ndim > 0 and len(numbers) == rows > 0
    if numbers.dtype.kind in "iub":
        steps = np.diff(numbers.astype("int64")) if numbers.ndim == 1 else np.array([-1, 1])
        is_monotone = (steps >= 0).all() or (steps <= 0).all()  # as offsets of sequences
        return _move_rows(numbers, variation) if has_rows and not is_monotone else numbers
    if has_rows:
        numbers = _move_rows(numbers, variation)
        if variation.mixed:
            before = np.roll(numbers, 1, 0)
            numbers = (1 - variation.mixed) * numbers + variation.mixed * before
    if variation.scale:
        return numbers * variation.scale
    has_both_signs = numbers.dtype.kind == "f" and (numbers < 0).any() and (numbers > 0).any()
    return np.zeros_like(numbers) if has_both_signs else numbers


def _move_rows(rows: Any, variation: Variation) -> Any:
    if variation.shift is None:
        return np.broadcast_to(rows[:1], rows.shape).copy()
    return np.roll(rows, variation.shift, 0)


class _Difference(NamedTuple):
    """The place where two runs of a forward differ.

    Attributes:
        path: The path of the layer whose forward differs.
        place: File and line.
        expected: The call of the first run.
        got: The call of the second run.
    """

    path: str
    place: str | None
    expected: str
    got: str


def require_same_calls(capturing: Capturing) -> None:
    """Runs a model's forward on other numbers, and checks that it makes the same calls.

    A sublayer whose forward makes other calls becomes a single node, whose calls are not recorded.

    Raises:
        CaptureError: The model's own forward makes other calls.
    """
    model = capturing.model
    layers = dict(model.named_sublayers(include_self=True))
    while True:
        # With attributes of layers kept from run to run, state that Python keeps shows.
        with attributes_running_on(model), capturing.notice_if_slow():
            difference = _difference(capturing)
        if difference is None:
            return
        if not difference.path:
            raise CaptureError(
                f"the forward of {type(model).__name__} {_WHAT}",
                where=difference.place,
                expected=difference.expected,
                got=difference.got,
                cause="Python computes with what depends on the numbers in a batch, on earlier "
                "calls, or on chance",
                fix="compute it by operations of Paddle's; or put that code into a sublayer: what "
                "is within one may do anything",
            )
        capturing.unopened.add(
            type(layers[difference.path]), f"its forward {_WHAT}, {difference.place}"
        )


def require_same_modes(first: Capture, again: Capture) -> None:
    """Raises an error if a forward switches layers' modes in another way each time.

    Args:
        first: A run that switches modes.
        again: A second run, which starts from the modes that the first has left.
    """
    difference = _first_difference(first, again)
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


def _difference(capturing: Capturing) -> _Difference | None:
    """Returns the first place where runs on other numbers differ from the run on the example."""
    look = capturing.look
    # A forward that reads numbers is refused earlier, so one variation in each mode is enough.
    for training, change in ((True, ROLLED), (False, MIXED)):
        while True:
            first = capturing(look, training)
            changes = capturing.unopened.changes
            second = _run(capturing, change, training)
            for node in _selecting(first, second):
                capturing.unopened.add_selecting(node)
            if changes == capturing.unopened.changes:
                break
        difference = _first_difference(first, second)
        if difference is not None:
            # A constant may be computed in its first use only: later runs decide.
            capturing.forget()
            first, second = capturing(look, training), _run(capturing, change, training)
            difference = _first_difference(first, second)
        if difference is not None:
            place = difference.place or forward_place(capturing.model)
            return difference._replace(place=place)
    return None


def _run(capturing: Capturing, change: Variation, training: bool) -> Capture:
    """Runs the forward on varied numbers; with ``ROLLED`` if it fails with another variation."""
    try:
        return capturing.with_numbers(vary_example(capturing, change), training)
    except CaptureError as error:
        if not isinstance(error.__cause__, Exception):
            raise
        if change is ROLLED:
            raise CaptureError(
                f"the forward runs on the example, and fails on other numbers: "
                f"{reason(error.__cause__)}",
                where=raised_at(error.__cause__.__traceback__),
                cause="some numbers have to fit to others, as the sizes of images to their pixels",
                fix="name the small input of whole numbers that says sizes in shape_inputs; or set "
                "verify=False",
            ) from error
        return capturing.with_numbers(vary_example(capturing, ROLLED), training)


def _selecting(first: Capture, second: Capture) -> Iterator[str]:
    """Yields the names of nodes whose outputs have another shape in the second run."""
    for node, other in zip(first.nodes, second.nodes):
        if node.function != other.function or node.makes != other.makes:
            return
        for value in node.makes - first.selected:
            if first.likes[value].shape != second.likes[value].shape:
                yield node.name


def _first_difference(first: Capture, second: Capture) -> _Difference | None:
    """Returns the first difference of two runs; None if they make the same calls."""
    for node, other in zip_longest(first.nodes, second.nodes):
        texts = _differing(node, other)
        if texts is not None:
            one: Node = other or node
            opened = one.scopes[: -1 if one.is_layer else None]
            return _Difference(opened[-1].path, one.place, *texts)
    if first.outputs != second.outputs:
        return _Difference("", None, "an output", "another output")
    return None


def _differing(node: Node | None, other: Node | None) -> tuple[str, str] | None:
    """Returns texts for two nodes that differ; None if they are the same."""
    if node is None or other is None or node.name != other.name:
        return _node_text(node), _node_text(other)
    for one, another in zip_longest(_arguments(node), _arguments(other), fillvalue="nothing"):
        if not _same(one, another):
            return f"{node.name} with {_text(one)}", f"{node.name} with {_text(another, True)}"
    if node.modes != other.modes:
        return f"{node.name} in one mode", f"{node.name} in another"
    return None


def _node_text(node: Node | None) -> str:
    return "nothing more" if node is None else node.name


def _arguments(node: Node) -> Iterator[object]:
    """Yields the path of each argument of a node, then the argument."""
    for path, leaf in parts((node.args, node.named)):
        yield path
        yield leaf


def _same(one: object, other: object) -> bool:
    """Whether two arguments are equal; objects of classes that it does not know always are."""
    if type(one) is not type(other):
        return False
    if isinstance(one, paddle.Tensor):
        one, other = one.numpy(), other.numpy()  # type: ignore[attr-defined]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.tobytes() == other.tobytes()
    # What other objects do shows in the outputs.
    is_plain = isinstance(one, (*PLAIN, tuple, Ref, Owned))
    return not is_plain or one == other or (one != one and other != other)


def _text(value: object, other: bool = False) -> str:
    """Returns an argument in words; ``other`` if it is that of the second run."""
    if isinstance(value, paddle.Tensor):
        return f"a constant {list(value.shape)}" + " of other numbers" * other
    if isinstance(value, Ref):
        return "another value" if other else "a value"
    return value.path if isinstance(value, Owned) else f"{value!r}"[:60]
