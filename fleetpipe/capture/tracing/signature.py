"""The signature of a batch as text: containers, shapes, dtypes, and plain values.

Stages send it with their values, so that a rank with only a part of a model knows which capture
belongs to the batch, and can repeat that capture with other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from fleetpipe.aliases import DType, Nest, Tensor
from fleetpipe.dygraph.nest import leaves, rebuild, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle

#: A signature.
Signature = str

#: Rows of an example where a specification leaves them open, and no job says.
ROWS = 2

#: The classes of plain values.
PLAIN = (type(None), bool, int, float, str)

#: Keys of a dict of inputs, or indices in a tuple of them.
Keys = Collection[object]


def signature_of(value: Nest, numbers: Keys | None = ()) -> Signature:
    """Returns the signature of a model's inputs.

    Args:
        value: The inputs.
        numbers: The inputs whose whole numbers are in the signature; None for all.

    Raises:
        CaptureError: They contain something other than tensors and plain values.
    """
    return json.dumps(_describe(value, numbers))


def whole_at(inputs: Nest, keys: Keys) -> list[Tensor]:
    """Returns the tensors of whole numbers, or bools, in the inputs with these keys."""
    items: Iterable[tuple[object, Nest]] = inputs.items() if isinstance(inputs, dict) else ()
    items = enumerate(inputs) if isinstance(inputs, (tuple, list)) else items
    return [t for key, item in items if key in keys for t in tensors_of(item) if _is_whole(t)]


def numbers_like(signature: Signature, example: Nest) -> Nest:
    """Returns inputs with a signature, filled by repeating an example's numbers, or with zeros.

    Args:
        signature: The signature, whose own numbers stay.
        example: Inputs. Not every forward takes zeros: a mask may leave nothing of them.
    """
    numbers = tensors_of(example)

    def build(dtype: DType, shape: list[int], *whole: Any) -> Tensor:
        zeros = paddle.zeros(shape, dtype)
        tensor = next(numbers, zeros)
        if whole:
            return paddle.to_tensor(whole[0], dtype).reshape(shape)
        if tensor.dtype != zeros.dtype or not tensor.size:
            return zeros
        return with_numbers(tensor, lambda numbers: np.resize(numbers, zeros.shape))

    return _build(json.loads(signature), build)


def with_numbers(tensor: Tensor, change: Callable[[Any], Any]) -> Tensor:
    """Applies a function of NumPy arrays to a tensor's numbers, and keeps its dtype.

    NumPy is used because Paddle has few kernels for uint8, int16 or float16 on a CPU.
    """
    numbers = (tensor.astype("float64") if tensor.is_floating_point() else tensor).numpy()
    return paddle.to_tensor(change(numbers)).astype(tensor.dtype)


def _describe(value: Nest, numbers: Keys | None) -> Any:
    if isinstance(value, paddle.Tensor):
        described = [str(value.dtype).rpartition(".")[2], list(value.shape)]
        whole = numbers is None and _is_whole(value)
        return {"tensor": [*described, value.tolist()] if whole else described}

    def describe(key: object, item: Nest) -> Any:
        return _describe(item, None if numbers is None or key in numbers else ())

    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [describe(*pair) for pair in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": {key: describe(key, item) for key, item in value.items()}}
    if isinstance(value, PLAIN):
        return {"plain": value}
    raise CaptureError(
        "the inputs of a captured model are tensors and plain values",
        expected="Tensors, None, bools, numbers and texts, in tuples, lists and dicts",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        fix="make tensors of it before, or inside a sublayer",
    )


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _build(described: Any, tensor: Callable[..., Tensor]) -> Nest:
    ((kind, content),) = described.items()
    if kind == "tensor":
        return tensor(*content)
    if kind == "dict":
        return {key: _build(item, tensor) for key, item in content.items()}
    if kind == "plain":
        return content
    items = [_build(item, tensor) for item in content]
    return items if kind == "list" else tuple(items)


def complete(inputs: Nest, example: Nest) -> Nest:
    """Adds the plain values of an example to inputs that lack them.

    A batch consists of tensors; other arguments of the forward come from the example. Tensors that
    a batch leaves out stay left out, as in a call of the model without them. Entries of a dict come
    in the example's order.

    Raises:
        CaptureError: There is no place for the plain values, or a container is another one.
    """
    if isinstance(example, (tuple, list)) and isinstance(inputs, paddle.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, (tuple, list)) and isinstance(example, paddle.Tensor):
        example = (example,)
    return _complete(inputs, example)


def _complete(inputs: Nest, example: Nest) -> Nest:
    if isinstance(example, PLAIN):
        return example if inputs is None else inputs
    if isinstance(example, dict) and isinstance(inputs, dict):
        values = {
            key: _complete(inputs.get(key), item)
            for key, item in example.items()
            if key in inputs or not _has_tensors(item)
        }
        return {**values, **{key: item for key, item in inputs.items() if key not in example}}
    if isinstance(example, (tuple, list)) and isinstance(inputs, (tuple, list)):
        missing = example[len(inputs) :]
        if not any(map(_has_tensors, missing)):
            inputs = rebuild(inputs, [*inputs, *missing]) if missing else inputs
        elif any(_has_plain(item) for item in missing if not _has_tensors(item)):
            raise _no_place(inputs, example)
        pairs = map(_complete, inputs, example)
        return rebuild(inputs, [*pairs, *inputs[len(example) :]])
    if inputs is not None and not isinstance(example, paddle.Tensor) and _has_plain(example):
        raise _no_place(inputs, example)
    kinds = (paddle.Tensor, dict, (tuple, list))
    if inputs is not None and any(isinstance(inputs, k) != isinstance(example, k) for k in kinds):
        raise CaptureError(
            "a batch has another container than example_inputs",
            expected=f"in each micro-batch inputs like {signature_of(example)}",
            got=signature_of(inputs),
            cause="a list in a batch has one value for each micro-batch",
            fix="give a tuple in the place of a list: ((a, b, c),) for ([a, b, c],)",
        )
    return inputs


def _has_tensors(value: Nest) -> bool:
    return any(True for _ in tensors_of(value))


def _has_plain(value: Nest) -> bool:
    """Whether there is a plain value other than None, which means a missing one."""
    return any(isinstance(leaf, PLAIN) and leaf is not None for _, leaf in leaves(value))


def _no_place(inputs: Nest, example: Nest) -> CaptureError:
    return CaptureError(
        "a batch has no place for the plain values of example_inputs",
        expected=f"inputs like {signature_of(example)}",
        got=signature_of(inputs),
        cause="a batch is made of tensors, and the forward takes the plain values of the example",
        fix="give batches the containers of the example, with None for a tensor that is left out",
    )


def example_of(inputs: Nest, rows: int) -> Nest:
    """Replaces each ``InputSpec`` among inputs by random numbers.

    Args:
        inputs: Tensors, specifications and plain values, nested.
        rows: The size of dimensions that a specification leaves open.
    """
    if isinstance(inputs, paddle.static.InputSpec):
        shape = [rows if size in (None, -1) else size for size in inputs.shape]
        numbers = np.random.default_rng(0)
        dtype: DType = str(inputs.dtype).rpartition(".")[2].lower()
        whole = "int" in dtype or dtype == "bool"
        values = numbers.integers(0, 2, shape) if whole else numbers.standard_normal(shape)
        return paddle.to_tensor(values).astype(dtype)
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(example_of(item, rows) for item in inputs)
    if isinstance(inputs, dict):
        return {key: example_of(item, rows) for key, item in inputs.items()}
    return inputs
