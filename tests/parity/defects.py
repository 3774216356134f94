"""What the tests of injected defects share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetpipe import parity
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor
from tests.pipelines import ROWS


def differences(report: parity.Report) -> list[tuple[str, str, int]]:
    """Quantity, name and step of everything that differs."""
    return [(found.quantity, found.name, found.step) for found in report.differences]


def cut_by_hand(value: Any) -> list[Any]:
    """The micro-batches of a tensor."""
    return [value[start : start + ROWS] for start in range(0, value.shape[0], ROWS)]


#: ``form(inputs, labels)`` gives them to ``train_batch``.
FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "tensors": lambda x, y: [x, y],
    "a tuple of both": lambda x, y: (x, y),
    "lists": lambda x, y: [cut_by_hand(x), cut_by_hand(y)],
    "a list and a tensor": lambda x, y: [cut_by_hand(x), y],
    "an iterator": lambda x, y: iter(list(zip(cut_by_hand(x), cut_by_hand(y)))),
    "a generator": lambda x, y: (pair for pair in list(zip(cut_by_hand(x), cut_by_hand(y)))),
    "a preprocessor": lambda x, y: PipelineDatasetPreprocessor(lambda: [x, y]),
    "a preprocessor of an iterator": lambda x, y: PipelineDatasetPreprocessor(
        lambda: iter(list(zip(cut_by_hand(x), cut_by_hand(y))))
    ),
}
