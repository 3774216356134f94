"""The tensors inside a value that crosses between stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetpipe._paddle import paddle


def tensors_of(value: Any) -> Iterator[Any]:
    """Yields the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def differentiable(value: Any) -> list[Any]:
    """Returns the tensors in ``value``, in order, whose gradient travels back over the edge."""
    return [tensor for tensor in tensors_of(value) if not tensor.stop_gradient]


def outline(value: Any) -> str:
    """Says in a few words what tensors a value holds, for messages."""
    tensors = [f"{str(t.dtype).split('.')[-1]}{list(t.shape)}" for t in tensors_of(value)]
    return f"{type(value).__name__} of {', '.join(tensors) or 'no tensors'}"
