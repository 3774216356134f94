"""Functions on the nested values that layers and stages pass on: finds and replaces their tensors.

A nested value is a tensor, or tuples, lists and dicts of tensors and other objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import copy_of

#: The indices and keys that lead from a nested value to one of its leaves.
Path = tuple[object, ...]

#: The types of containers of which nested values are made.
_CONTAINERS = (tuple, list, dict)

#: The dtypes that have no gradient.
_INTEGER_DTYPES = {paddle.bool, paddle.uint8, paddle.int8, paddle.int16, paddle.int32, paddle.int64}


def leaves(value: Nest, exact: bool = False, path: Path = ()) -> Iterator[tuple[Path, Nest]]:
    """Yields the leaves of nested tuples, lists and dicts, in order, each with its path.

    Args:
        value: Nested containers, or a leaf itself.
        exact: Whether an object of a subclass of tuple, list or dict is a leaf.
        path: The path of ``value`` itself.
    """
    if not isinstance(value, _CONTAINERS) or (exact and type(value) not in _CONTAINERS):
        yield path, value
        return
    for step, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, exact, (*path, step))


def tensors_of(value: Nest) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dicts, in order."""
    tensors: list[Tensor] = []
    _append_tensors(value, tensors)
    return iter(tensors)


def _append_tensors(value: Nest, tensors: list[Tensor]) -> None:
    """Appends the tensors in a value to a list; a generator would cost a call for each tensor."""
    if isinstance(value, paddle.Tensor):
        tensors.append(value)
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, paddle.Tensor):
                tensors.append(item)
            elif isinstance(item, _CONTAINERS):
                _append_tensors(item, tensors)


def tensors_by_place(value: Nest) -> dict[str, Tensor]:
    """Returns the tensors in a nested value by their paths: ``{"[0]['mask']": tensor}``."""
    return {
        "".join(f"[{step!r}]" for step in path): leaf
        for path, leaf in leaves(value)
        if isinstance(leaf, paddle.Tensor)
    }


def needs_gradient(tensor: Tensor) -> bool:
    """Whether backward may start from a tensor: the tensor needs a gradient, and is no integer."""
    # The indices of topk, for example, are integers without stop_gradient.
    return not tensor.stop_gradient and tensor.dtype not in _INTEGER_DTYPES


def differentiable(value: Nest, roots: bool = False) -> list[Tensor]:
    """Returns the tensors in ``value`` that need a gradient, in order.

    Args:
        value: A nested value, such as one that a stage sends, and whose gradients it gets back.
        roots: Whether backward starts from the tensors, so that integers are left out. Integers
            that were cast need a gradient in Paddle, and stages exchange these gradients, too.
    """
    if isinstance(value, paddle.Tensor) and not roots:
        return [] if value.stop_gradient else [value]
    return [t for t in tensors_of(value) if (needs_gradient(t) if roots else not t.stop_gradient)]


def rebuild(container: Nest, items: Iterable[Nest]) -> Nest:
    """Returns ``items`` in a container of the class of ``container``, a list or a tuple."""
    kind = type(container)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def join(combine: Callable[[Sequence[Nest]], Nest], values: Sequence[Nest]) -> Nest:
    """Joins several nested values item by item; ``combine`` joins values that are not containers.

    Containers of one class with the same number of items, or with the same keys, become one
    container like the first. Unlike containers are passed to ``combine``, too.
    """
    first = values[0]
    same_type = len({*map(type, values)}) == 1
    if same_type and isinstance(first, (tuple, list)) and len({*map(len, values)}) == 1:
        return rebuild(first, [join(combine, items) for items in zip(*values)])
    if same_type and isinstance(first, dict) and all(v.keys() == first.keys() for v in values):
        return {key: join(combine, [value[key] for value in values]) for key in first}
    return combine(values)


def map_tensors(change: Callable[[Tensor], Nest], value: Nest) -> Nest:
    """Returns ``value`` with each tensor replaced by ``change(tensor)``."""
    if isinstance(value, paddle.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return rebuild(value, [map_tensors(change, item) for item in value])
    return value


def replace(value: Nest, replacements: Mapping[int, Tensor]) -> Nest:
    """Returns ``value`` with each tensor whose id is in ``replacements`` replaced."""
    return map_tensors(lambda tensor: replacements.get(id(tensor), tensor), value)


def copies_of(value: Nest) -> dict[int, Tensor]:
    """Returns a copy of each tensor in a nested value, by the ids of the originals."""
    return {id(tensor): copy_of(tensor) for tensor in tensors_of(value)}


def copy_tensors(value: Nest) -> Nest:
    """Returns ``value`` with each tensor replaced by a copy; a tensor twice in it has one copy."""
    if isinstance(value, paddle.Tensor):
        return copy_of(value)
    return replace(value, copies_of(value))


def leaf_like(tensor: Tensor, copied: bool = False) -> Tensor:
    """Returns a detached tensor with the same data and ``stop_gradient``.

    Args:
        tensor: The tensor.
        copied: Whether to copy the data instead of sharing its memory.
    """
    leaf = copy_of(tensor.detach()) if copied else tensor.detach()
    leaf.stop_gradient = tensor.stop_gradient
    return leaf


def leaves_like(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Returns a :func:`leaf_like` tensor for each of ``tensors``, by the ids of the originals."""
    return {id(tensor): leaf_like(tensor) for tensor in tensors}


def outline(value: Nest) -> str:
    """Describes a value in a message: its type, and the dtypes and shapes of its tensors."""
    tensors = [f"{str(t.dtype).split('.')[-1]}{list(t.shape)}" for t in tensors_of(value)]
    return f"{type(value).__name__} of {', '.join(tensors) or 'no tensors'}"
