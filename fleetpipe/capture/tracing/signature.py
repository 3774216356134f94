"""The signature of a batch as text, and which numbers and sizes of a run depend only on it.

A signature has the containers, dtypes, shapes and plain values of the inputs. Stages send it with
their values, so that a rank with only a part of a model knows which capture belongs to the batch.
``Sizes`` tracks numbers that are equal in all batches with one signature, as those that
``paddle.shape`` returns: code may read them, since each signature has its own capture.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fleetpipe.aliases import DType, Nest, Tensor
from fleetpipe.capture.tracing.user_lines import asked_by_paddle
from fleetpipe.capture.tracing.value import map_parts
from fleetpipe.dygraph.nest import leaves, rebuild, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import Function
from fleetpipe.paddle_api.random import generator_states

#: A signature.
Signature = str

#: The number of rows of an example, if neither its specification nor a job has one.
ROWS = 2

#: The classes of plain values.
PLAIN = (type(None), bool, int, float, str)

#: Keys of a dict of inputs, or indices in a tuple of them.
Keys = Collection[object]

#: Operations that depend only on the size of a tensor.
_OF_SIZE = {"shape", "shape64", "numel", "size", "is_empty"}

#: Operations that return uninitialized memory.
_UNSET = {"empty", "empty_like"}

#: Operations whose number of output rows depends on numbers, with the index of the first argument
#: whose numbers count.
_SELECTING = {
    **dict.fromkeys(("nonzero", "where_index", "unique", "unique_consecutive", "bincount"), 0),
    **dict.fromkeys(("nms", "multiclass_nms3", "matrix_nms", "generate_proposals"), 0),
    "masked_select": 1,
    "segment_pool": 1,
    **dict.fromkeys(("ctc_align", "sequence_mask"), 0),
}

#: Operations with whole numbers that may be sizes, with the index of the first such argument.
_RESIZING = {
    **dict.fromkeys(("reshape", "reshape2", "view_shape", "expand", "expand_v2", "tile"), 1),
    **dict.fromkeys(("crop", "pad", "pad3d", "slice", "strided_slice", "split", "topk"), 1),
    **dict.fromkeys(("one_hot", "pool2d", "conv2d_transpose", "full_with_tensor"), 1),
    **dict.fromkeys(("nearest_interp", "bilinear_interp", "bicubic_interp", "linear_interp"), 1),
    **dict.fromkeys(("trilinear_interp", "repeat_interleave"), 1),
    "repeat_interleave_with_tensor_index": 1,
    **dict.fromkeys(("full", "arange", "range_v2", "eye"), 0),
    **dict.fromkeys(("linspace", "logspace", "uniform", "gaussian", "randint", "randperm"), 0),
    **dict.fromkeys(("truncated_gaussian_random", *_UNSET), 0),
}

#: Operations whose outputs may have sizes that depend on numbers.
_TELLING = {*_SELECTING, *_RESIZING, "getitem_dygraph"}

_WHOLE = (paddle.int32, paddle.int64)

_OPERATORS: Mapping[str, Function] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg")},
    "bool": bool,
}

_READS: tuple[Any, ...] = (operator.index, int, float, hash, str, repr, format)


def signature_of(value: Nest, numbers: Keys | None = ()) -> Signature:
    """Returns the signature of a model's inputs.

    Args:
        value: The inputs.
        numbers: The inputs whose whole numbers are in the signature; None for all.

    Raises:
        CaptureError: The inputs contain something other than tensors and plain values.
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
        signature: The signature; numbers that it has are kept.
        example: The inputs whose numbers are repeated, since a forward may fail on zeros.
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
    """Returns inputs as plain values for JSON; see :func:`signature_of`."""
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
    """Builds inputs from what :func:`_describe` returned; ``tensor`` makes each tensor."""
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
    a batch lacks are not added. Entries of a dict are in the example's order.

    Raises:
        CaptureError: The plain values do not fit in, or the batch has another container.
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
    """Whether there is a plain value other than None."""
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


class Size:
    """A size of a dimension that depends on numbers: an int whose use counts as a read."""

    # So that isinstance(size, int) is true for Paddle's functions.
    __class__ = property(lambda _: int)

    def __init__(self, size: int, other: int | None, read: Callable[[], None]) -> None:
        """Stores the size.

        Args:
            size: The size in this run.
            other: The value in a run in which the dimension has another size; None if unknown.
            read: Called when the size is used.
        """
        self._size, self._other, self._read = size, other, read

    @property
    def value(self) -> int:
        """The number; asking for it counts as a read."""
        self._read()
        return self._size

    def made(self, function: Function, *operands: Any) -> Any:
        """Applies a function to sizes and numbers; returns another :class:`Size`, or a bool.

        A comparison counts as a read, unless Paddle's own function makes it, and it has the same
        result in the other run: so Paddle may check whether sizes fit.
        """
        sizes, another = zip(
            *((o._size, o._other) if type(o) is Size else (o, o) for o in operands)
        )
        size = function(*sizes)
        other = None if None in another else function(*another)
        if not isinstance(size, bool):
            return Size(size, other, self._read)
        if size is not other or not asked_by_paddle():
            self._read()
        return size


def _on_sizes(function: Function, swapped: bool = False) -> Function:
    """Returns a method of :class:`Size` that applies an operator."""

    def compute(*arguments: Any) -> Any:
        size: Size = arguments[0]
        return size.made(function, *(reversed(arguments) if swapped else arguments))

    return compute


def _read(function: Function) -> Function:
    return lambda size, *operands: function(size.value, *operands)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Size, f"__{_name}__", _on_sizes(getattr(operator, _name)))
    setattr(Size, f"__r{_name}__", _on_sizes(getattr(operator, _name), swapped=True))
for _name, _function in _OPERATORS.items():
    setattr(Size, f"__{_name}__", _on_sizes(_function))
for _function in _READS:
    setattr(Size, f"__{_function.__name__}__", _read(_function))


def whole(value: Nest) -> Nest:
    """Replaces each :class:`Size` in ``value`` by its number."""
    return map_parts(value, lambda leaf: leaf.value if type(leaf) is Size else leaf)


def tensors_in(value: Nest) -> list[Tensor]:
    """Returns the tensors in arguments, those in slices included."""
    tensors: list[Tensor] = []
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, paddle.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            rest.extend(reversed(value))
        elif isinstance(value, dict):
            rest.extend(reversed(list(value.values())))
        elif isinstance(value, slice):
            rest += [value.step, value.stop, value.start]
    return tensors


class Sizes:
    """Tracks sizes through the operations of a run, also within layers that are not opened."""

    def __init__(self) -> None:
        #: By id, tensors whose numbers depend only on the signature, with their version.
        self._fixed: dict[int, tuple[Tensor, int]] = {}
        #: By id, tensors that a layer which is not opened has made of Python's numbers.
        self._plain: dict[int, Tensor] = {}
        #: By id, tensors whose sizes depend on numbers, each with one of another size, if known.
        self._selected: dict[int, tuple[Tensor, Tensor | None]] = {}
        #: Whether any code has got a :class:`Size`.
        self.asked_for = False
        #: Whether the running layer, which is not opened, has read numbers of the batch.
        self.blind = False
        #: Whether an operation runs on tensors of other sizes, which is not recorded.
        self.trying = False

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """Marks the numbers of tensors as dependent on the batch's signature alone."""
        self._fixed.update({id(one): (one, one.inplace_version) for one in tensors})

    def fixed(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor depend only on the batch's signature."""
        return bool(self._fixed.get(id(tensor), (None, None))[1] == tensor.inplace_version)

    def selected(self, tensor: Tensor) -> bool:
        """Whether the size of a tensor depends on numbers."""
        return id(tensor) in self._selected

    def dimensions(self, tensor: Tensor, shape: list[int], read: Callable[[], None]) -> list[Any]:
        """Returns a shape with a :class:`Size` for each dimension that depends on numbers."""
        self.asked_for = True
        other = self._selected[id(tensor)][1]
        sizes: list[Any] = [None] * len(shape)
        if other is not None and len(_shape(other)) == len(shape):
            sizes = _shape(other)
        return [
            size if size == there else Size(size, there, read) for size, there in zip(shape, sizes)
        ]

    def select(self, tensors: Iterable[Tensor]) -> None:
        """Marks the sizes of tensors as dependent on numbers."""
        self._selected.update({id(one): (one, None) for one in tensors if len(_shape(one))})

    def done(
        self,
        function: Function,
        args: tuple[Any, ...],
        named: dict[str, Any],
        constant: Callable[[Tensor], bool] | None = None,
    ) -> Any:
        """Runs an operation, and records what its outputs depend on.

        Args:
            function: The operation.
            args: Its positional arguments.
            named: Its keyword arguments.
            constant: Returns whether a tensor comes from outside the run; None within a layer that
                is not opened, where that is unknown.
        """
        name = getattr(function, "__name__", "").strip("_")
        taken = tensors_in((args, named))
        if name in _OF_SIZE:
            depending = [one for one in taken if self.selected(one)]
        else:
            depending = [one for one in taken if not self.fixed(one)]
            if constant is not None:
                depending = [one for one in depending if not constant(one)]
        follows = not (depending or self.blind or name in _UNSET)
        states = generator_states() if follows else None
        output = function(*args, **named)
        made = tensors_in(output)
        if follows and states == generator_states():
            if taken or constant is not None:
                self.fix(made)
            else:
                self._plain.update({id(one): one for one in made})
        if depending and (name in _TELLING or any(map(self.selected, depending))):
            self.trying = True
            try:
                with paddle.no_grad():
                    self._follow(function, (args, named), {id(one) for one in depending}, made)
            finally:
                self.trying = False
        return output

    def _follow(self, function: Function, arguments: Nest, depending: set[int], made: Nest) -> None:
        """Records the outputs of an operation whose sizes depend on numbers.

        Args:
            function: The operation.
            arguments: Its positional and keyword arguments.
            depending: The ids of the inputs whose numbers depend on the batch.
            made: The outputs.
        """
        name = getattr(function, "__name__", "").strip("_")
        args, named = arguments
        says = [
            one
            for one in tensors_in((args[_SELECTING.get(name, _RESIZING.get(name, 0)) :], named))
            if id(one) in depending and id(one) not in self._plain
        ]
        if name in _SELECTING and says:
            return self._note(made, [_longer(one) for one in made])
        if name in _RESIZING and any(one.dtype in _WHOLE or not _RESIZING[name] for one in says):
            return self._note(made, None)
        index: tuple[Any, ...] = ()
        if name == "getitem_dygraph":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
        ends = tensors_in([item for item in index if isinstance(item, slice)])
        if any(id(one) in depending for one in ends):
            return self._note(made, None)
        masks = [
            one
            for one in tensors_in([item for item in index if not isinstance(item, slice)])
            if one.dtype == paddle.bool and id(one) in depending
        ]
        selected = {key: self._selected[key][1] for key in depending if key in self._selected}
        writes = name == "setitem_dygraph" or function.__name__.endswith("_")
        if not (selected or masks) or (writes and not self.selected(args[0])):
            return None
        if any(other is None for other in selected.values()):
            return self._note(made, None)
        for like in (paddle.ones_like, paddle.zeros_like):
            masked = {id(one): like(selected.get(id(one), one)) for one in masks}
            tried = _try(function, arguments, {**selected, **masked})
            if tried is None or [*map(_shape, tried)] != [*map(_shape, made)]:
                break
        if masks and tried is not None:
            # Some operations fail on an empty tensor, so the other output is one row longer.
            tried = [_longer(one, _shape(other)) for one, other in zip(made, tried)]
        return self._note(made, tried)

    def _note(self, made: list[Tensor], selected: list[Tensor] | None) -> None:
        """Records outputs with the outputs for other sizes, ``selected``; None if unknown."""
        for one, other in zip(made, selected or [None] * len(made)):
            if _shape(one) and (other is None or _shape(other) != _shape(one)):
                self._selected[id(one)] = (one, other)
            else:
                self._selected.pop(id(one), None)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _longer(tensor: Tensor, other: Sequence[int] | None = None) -> Tensor:
    """Returns zeros with one row more; or one element more if the shapes differ already."""
    shape = _shape(tensor)
    grows = [size != there for size, there in zip(shape, other)] if other else [True]
    shape = [size + more for size, more in zip(shape, [*grows, *[False] * len(shape)])]
    return paddle.zeros(shape, tensor.dtype)


def _try(
    function: Function, arguments: Nest, replacements: Mapping[int, Tensor]
) -> list[Tensor] | None:
    """Runs an operation on tensors of other sizes; returns None if it fails."""
    args, named = map_parts(arguments, lambda leaf: replacements.get(id(leaf), leaf))
    try:
        return tensors_in(function(*args, **named))
    except Exception:
        # The operation may fail on other sizes than the batch's.
        return None
