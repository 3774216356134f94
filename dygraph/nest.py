"""The tensors inside a value that crosses between stages, and values like it with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


def rebuilt(container: Any, items: Iterable[Any]) -> Any:
    """Returns a tuple or list of the class of ``container``, a named tuple too, with ``items``."""
    kind = type(container)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value like ``value`` with ``change(tensor)`` in the place of each tensor."""
    if isinstance(value, paddle.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [mapped(change, item) for item in value])
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return value


def replace(value: Any, others: Mapping[int, Any]) -> Any:
    """Returns ``value`` with the tensors in ``others`` put in place of the ones with those ids."""
    return mapped(lambda tensor: others.get(id(tensor), tensor), value)


def leaf_like(tensor: Any, copied: bool = False) -> Any:
    """Returns a tensor with the same data, shared or copied, which is cut from its graph."""
    other = tensor.detach().clone() if copied else tensor.detach()
    other.stop_gradient = tensor.stop_gradient
    return other


def leaves_like(tensors: Iterable[Any], copied: bool = False) -> dict[int, Any]:
    """Returns a :func:`leaf_like` each of ``tensors``, by their ids."""
    return {id(tensor): leaf_like(tensor, copied) for tensor in tensors}


def outline(value: Any) -> str:
    """Says in a few words what tensors a value holds, for messages."""
    tensors = [f"{str(t.dtype).split('.')[-1]}{list(t.shape)}" for t in tensors_of(value)]
    return f"{type(value).__name__} of {', '.join(tensors) or 'no tensors'}"
