"""Describes a batch by a text, its signature, and tracks which sizes of a run are data-dependent.

A signature has the containers, dtypes, shapes and plain values (None, bools, numbers, strings) of a
model's inputs. Each signature has its own capture. Stages send it with their values, so that a rank
with only some stages knows which capture belongs to the batch. A size is data-dependent if it
depends on the numbers in a batch, as the number of rows that a mask selects: code must not read it.
Numbers that depend only on the signature, such as the result of ``paddle.shape``, may be read.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partialmethod
from typing import Any

import numpy as np

from fleetpipe.aliases import DType, Nest, Tensor
from fleetpipe.capture.tracing.user_lines import called_by_paddle
from fleetpipe.capture.tracing.value import map_parts, parts
from fleetpipe.dygraph.nest import leaves, rebuild, tensors_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import Function
from fleetpipe.paddle_api.random import generator_states

#: The JSON text that describes a batch; see :func:`signature_of`.
Signature = str

#: The number of rows of an example, if neither its ``InputSpec`` nor a job has one.
ROWS = 2

#: The classes of plain values: the inputs of a model that are not tensors.
PLAIN = (type(None), bool, int, float, str)

#: Keys of a dict of inputs, or indices in a tuple of inputs.
Keys = Collection[object]

#: Operations whose result depends only on the shape of their input.
_SIZE_QUERIES = {"shape", "shape64", "numel", "size", "is_empty"}

#: Operations that return uninitialized memory.
_UNINITIALIZED = {"empty", "empty_like"}

#: Operations whose number of output rows depends on the numbers in their inputs, each with the
#: index of the first argument whose numbers count.
_SELECTING = {
    **dict.fromkeys(("nonzero", "where_index", "unique", "unique_consecutive", "bincount"), 0),
    **dict.fromkeys(("nms", "multiclass_nms3", "matrix_nms", "generate_proposals"), 0),
    "masked_select": 1,
    "segment_pool": 1,
    **dict.fromkeys(("ctc_align", "sequence_mask"), 0),
}

#: Operations with integer arguments that may be output sizes, each with the index of the first.
_RESIZING = {
    **dict.fromkeys(("reshape", "reshape2", "view_shape", "expand", "expand_v2", "tile"), 1),
    **dict.fromkeys(("crop", "pad", "pad3d", "slice", "strided_slice", "split", "topk"), 1),
    **dict.fromkeys(("one_hot", "pool2d", "conv2d_transpose", "full_with_tensor"), 1),
    **dict.fromkeys(("nearest_interp", "bilinear_interp", "bicubic_interp", "linear_interp"), 1),
    **dict.fromkeys(("trilinear_interp", "repeat_interleave"), 1),
    "repeat_interleave_with_tensor_index": 1,
    **dict.fromkeys(("full", "arange", "range_v2", "eye"), 0),
    **dict.fromkeys(("linspace", "logspace", "uniform", "gaussian", "randint", "randperm"), 0),
    **dict.fromkeys(("truncated_gaussian_random", *_UNINITIALIZED), 0),
}

#: Operations whose outputs may have data-dependent sizes.
_SHAPING = {*_SELECTING, *_RESIZING, "getitem_dygraph"}

_INTEGER_DTYPES = (paddle.int32, paddle.int64)

#: The comparisons and unary operators of :class:`Size`, by the name of its method without ``__``.
_OPERATORS: Mapping[str, Function] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg")},
    "bool": bool,
}

#: The functions that need the number of a :class:`Size`: a call counts as a read of it.
_READING_FUNCTIONS: tuple[Any, ...] = (operator.index, int, float, hash, str, repr, format)


def signature_of(value: Nest, numbers: Keys | None = ()) -> Signature:
    """Returns the signature of a model's inputs as JSON.

    Args:
        value: The inputs.
        numbers: The keys of inputs of integers whose numbers are part of the signature; None for
            all inputs of integers.

    Raises:
        CaptureError: The inputs contain something other than tensors and plain values.
    """
    return json.dumps(_describe(value, numbers))


def integer_tensors_at(inputs: Nest, keys: Keys) -> list[Tensor]:
    """Returns the tensors of integers or bools in those inputs of a model that have these keys."""
    items: Iterable[tuple[object, Nest]] = ()
    if isinstance(inputs, dict):
        items = inputs.items()
    elif isinstance(inputs, (tuple, list)):
        items = enumerate(inputs)
    return [t for key, item in items if key in keys for t in tensors_of(item) if _is_integer(t)]


def inputs_with_signature(signature: Signature, example: Nest) -> Nest:
    """Builds inputs that have a signature, from the numbers of an example or from zeros.

    Args:
        signature: The signature; a tensor whose numbers it contains gets these numbers.
        example: The inputs whose numbers fill the other tensors, repeated to their shapes, since a
            forward may fail on zeros. A tensor of another dtype is filled with zeros.
    """
    example_tensors = tensors_of(example)

    def build_tensor(dtype: DType, shape: list[int], *integers: Any) -> Tensor:
        """Returns a tensor with the given integers, or else filled from the next example tensor."""
        zeros = paddle.zeros(shape, dtype)
        like = next(example_tensors, zeros)
        if integers:
            return paddle.to_tensor(integers[0], dtype).reshape(shape)
        if like.dtype != zeros.dtype or not like.size:
            return zeros
        return map_numbers(like, lambda numbers: np.resize(numbers, zeros.shape))

    return _build_inputs(json.loads(signature), build_tensor)


def map_numbers(tensor: Tensor, change: Callable[[Any], Any]) -> Tensor:
    """Returns a new tensor: ``change`` applied to a tensor's numbers as an array, in its dtype.

    NumPy is used because Paddle has few kernels for uint8, int16 or float16 on a CPU.
    """
    numbers = (tensor.astype("float64") if tensor.is_floating_point() else tensor).numpy()
    return paddle.to_tensor(change(numbers)).astype(tensor.dtype)


def _describe(value: Nest, numbers: Keys | None) -> Any:
    """Describes inputs by dicts and lists for JSON; the arguments are those of `signature_of`."""
    if isinstance(value, paddle.Tensor):
        dtype_and_shape = [str(value.dtype).rpartition(".")[2], list(value.shape)]
        if numbers is None and _is_integer(value):
            return {"tensor": [*dtype_and_shape, value.tolist()]}
        return {"tensor": dtype_and_shape}

    def describe(key: object, item: Nest) -> Any:
        """Describes an item, with the numbers of all its integers if its key is in ``numbers``."""
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


def _is_integer(tensor: Tensor) -> bool:
    """Returns whether the elements of a tensor are integers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _build_inputs(description: Any, build_tensor: Callable[..., Tensor]) -> Nest:
    """Builds a model's inputs from their description, which :func:`_describe` has made.

    ``build_tensor`` makes a tensor from the name of a dtype, a shape and, for integers, the
    numbers.
    """
    ((kind, content),) = description.items()
    if kind == "tensor":
        return build_tensor(*content)
    if kind == "dict":
        return {key: _build_inputs(item, build_tensor) for key, item in content.items()}
    if kind == "plain":
        return content
    items = [_build_inputs(item, build_tensor) for item in content]
    return items if kind == "list" else tuple(items)


def add_plain_values(inputs: Nest, example: Nest) -> Nest:
    """Returns a batch's inputs with the plain values of the example that they lack.

    A batch consists of tensors; other arguments of the forward come from the example. Tensors that
    the batch lacks are not added. The items of a dict are put into the example's order.

    Args:
        inputs: The inputs of one micro-batch.
        example: The inputs that the model was captured with.

    Raises:
        CaptureError: The batch has no position for a plain value, or has a list, tuple or dict
            where the example has another one.
    """
    if isinstance(example, (tuple, list)) and isinstance(inputs, paddle.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, (tuple, list)) and isinstance(example, paddle.Tensor):
        example = (example,)
    return _add_missing(inputs, example)


def _add_missing(inputs: Nest, example: Nest) -> Nest:
    """Returns an item of a batch's inputs, with the plain values that only the example has.

    ``example`` is the item at the same index or key of the inputs that the model was captured with.
    ``inputs`` may be None, if the batch leaves the item out.

    Raises:
        CaptureError: As for :func:`add_plain_values`.
    """
    if isinstance(example, PLAIN):
        return example if inputs is None else inputs
    if isinstance(example, dict) and isinstance(inputs, dict):
        values = {
            key: _add_missing(inputs.get(key), item)
            for key, item in example.items()
            if key in inputs or not _has_tensors(item)
        }
        return {**values, **{key: item for key, item in inputs.items() if key not in example}}
    if isinstance(example, (tuple, list)) and isinstance(inputs, (tuple, list)):
        # The last items of the example, which the batch does not have.
        missing = example[len(inputs) :]
        if not any(map(_has_tensors, missing)):
            inputs = rebuild(inputs, [*inputs, *missing]) if missing else inputs
        elif any(_has_plain(item) for item in missing if not _has_tensors(item)):
            raise _plain_values_error(inputs, example)
        items = map(_add_missing, inputs, example)
        return rebuild(inputs, [*items, *inputs[len(example) :]])
    if inputs is not None and not isinstance(example, paddle.Tensor) and _has_plain(example):
        raise _plain_values_error(inputs, example)
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
    """Returns whether nested inputs contain a tensor."""
    return any(True for _ in tensors_of(value))


def _has_plain(value: Nest) -> bool:
    """Returns whether nested inputs contain a plain value other than None."""
    return any(isinstance(leaf, PLAIN) and leaf is not None for _, leaf in leaves(value))


def _plain_values_error(inputs: Nest, example: Nest) -> CaptureError:
    """Returns the error for a batch with no position for a plain value of the example."""
    return CaptureError(
        "a batch has no place for the plain values of example_inputs",
        expected=f"inputs like {signature_of(example)}",
        got=signature_of(inputs),
        cause="a batch is made of tensors, and the forward takes the plain values of the example",
        fix="give batches the containers of the example, with None for a tensor that is left out",
    )


def fill_input_specs(inputs: Nest, rows: int) -> Nest:
    """Returns inputs in which each ``InputSpec`` is replaced by a tensor of random numbers.

    Args:
        inputs: Tensors, objects of ``InputSpec`` and plain values, nested.
        rows: The size of the dimensions that an ``InputSpec`` leaves open (None or -1).
    """
    if isinstance(inputs, paddle.static.InputSpec):
        shape = [rows if size in (None, -1) else size for size in inputs.shape]
        numbers = np.random.default_rng(0)
        dtype: DType = str(inputs.dtype).rpartition(".")[2].lower()
        if "int" in dtype or dtype == "bool":
            return paddle.to_tensor(numbers.integers(0, 2, shape)).astype(dtype)
        return paddle.to_tensor(numbers.standard_normal(shape)).astype(dtype)
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(fill_input_specs(item, rows) for item in inputs)
    if isinstance(inputs, dict):
        return {key: fill_input_specs(item, rows) for key, item in inputs.items()}
    return inputs


class Size:
    """The data-dependent size of a dimension: an int that reports when Python code uses its number.

    Arithmetic with it makes another ``Size``, computed for this run and for another run, in which
    the dimension has another size.
    """

    # So that isinstance(size, int) is true for Paddle's functions.
    __class__ = property(lambda _: int)

    def __init__(self, size: int, other_size: int | None, report: Callable[[], None]) -> None:
        """Stores the size.

        Args:
            size: The size in this run.
            other_size: The size in a run on other numbers; None if it is unknown.
            report: Called each time when the number of the size is read.
        """
        self._size, self._other_size, self._report = size, other_size, report

    @property
    def value(self) -> int:
        """The size in this run; asking for it counts as a read."""
        self._report()
        return self._size

    def read(self, function: Function, *arguments: Any) -> Any:
        """Applies a function of Python's, such as ``int``, to the size, which counts as a read."""
        return function(self.value, *arguments)

    def apply(self, function: Function, *operands: Any) -> Any:
        """Applies an operator to this size and other sizes or numbers.

        Returns:
            A bool for a comparison, another :class:`Size` for anything else. A comparison counts as
            a read, unless a function of Paddle's makes it and its result in the other run is the
            same: so Paddle may check whether sizes fit.
        """
        operands = (self, *operands)
        here = [operand._size if type(operand) is Size else operand for operand in operands]
        there = [operand._other_size if type(operand) is Size else operand for operand in operands]
        size = function(*here)
        other_size = None if None in there else function(*there)
        if not isinstance(size, bool):
            return Size(size, other_size, self._report)
        if size is not other_size or not called_by_paddle():
            self._report()
        return size


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(Size, f"__{_name}__", partialmethod(Size.apply, _function))
    # In an addition "2 + size" Python calls this method of the size with 2.
    setattr(Size, f"__r{_name}__", partialmethod(Size.apply, lambda b, a, f=_function: f(a, b)))
for _name, _function in _OPERATORS.items():
    setattr(Size, f"__{_name}__", partialmethod(Size.apply, _function))
for _function in _READING_FUNCTIONS:
    setattr(Size, f"__{_function.__name__}__", partialmethod(Size.read, _function))


def sizes_to_ints(value: Nest) -> Nest:
    """Returns nested arguments in which each :class:`Size` is an int; this counts as a read."""
    return map_parts(value, lambda leaf: leaf.value if type(leaf) is Size else leaf)


def tensors_in(value: Nest) -> list[Tensor]:
    """Returns the tensors in nested arguments in order, those in slices included."""
    return [leaf for _, leaf in parts(value) if isinstance(leaf, paddle.Tensor)]


class Sizes:
    """Tracks which tensors of a run have data-dependent sizes, operation by operation.

    A data-dependent tensor is stored with a substitute: the tensor of another size that the same
    operation would have returned for other numbers. Operations inside of nodes are tracked too.
    """

    def __init__(self) -> None:
        #: By id, each tensor whose numbers depend only on the signature, with its version.
        self._fixed: dict[int, tuple[Tensor, int]] = {}
        #: By id, the tensors that were made of Python's numbers inside of a node.
        self._plain: dict[int, Tensor] = {}
        #: By id, each tensor of a data-dependent size, with its substitute; None if unknown.
        self._data_dependent: dict[int, tuple[Tensor, Tensor | None]] = {}
        #: Whether code has received any :class:`Size`.
        self.handed_out = False
        #: Whether the running node has read the numbers of a tensor that depend on the batch.
        self.has_read_numbers = False
        #: Whether an operation runs again on substitutes, which is not recorded.
        self.is_trial_run = False

    def mark_fixed(self, tensors: Iterable[Tensor]) -> None:
        """Records that the numbers in tensors depend on the batch's signature alone."""
        self._fixed.update({id(tensor): (tensor, tensor.inplace_version) for tensor in tensors})

    def is_fixed(self, tensor: Tensor) -> bool:
        """Returns whether the numbers in a tensor depend only on the batch's signature."""
        _, version = self._fixed.get(id(tensor), (None, None))
        return bool(version == tensor.inplace_version)

    def is_data_dependent(self, tensor: Tensor) -> bool:
        """Returns whether the size of a tensor depends on the numbers in a batch."""
        return id(tensor) in self._data_dependent

    def track_shape(
        self, tensor: Tensor, shape: list[int], report: Callable[[], None]
    ) -> list[Any]:
        """Returns the shape of a data-dependent tensor, with a :class:`Size` where it may vary.

        Args:
            tensor: The tensor.
            shape: Its shape.
            report: Called when code reads the number of such a size.
        """
        self.handed_out = True
        _, substitute = self._data_dependent[id(tensor)]
        other_shape: list[Any] = [None] * len(shape)
        if substitute is not None and len(_shape(substitute)) == len(shape):
            other_shape = _shape(substitute)
        return [
            size if size == other_size else Size(size, other_size, report)
            for size, other_size in zip(shape, other_shape)
        ]

    def mark_data_dependent(self, tensors: Iterable[Tensor]) -> None:
        """Records that the sizes of tensors depend on the numbers in a batch."""
        self._data_dependent.update({id(t): (t, None) for t in tensors if len(_shape(t))})

    def run(
        self,
        function: Function,
        args: tuple[Any, ...],
        named: dict[str, Any],
        is_constant: Callable[[Tensor], bool] | None = None,
    ) -> Any:
        """Runs an operation, returns its output, and records what the output depends on.

        Args:
            function: The operation.
            args: Its positional arguments.
            named: Its keyword arguments.
            is_constant: Returns whether a tensor comes from outside the run; None inside of a node,
                where that is unknown.
        """
        name = getattr(function, "__name__", "").strip("_")
        inputs = tensors_in((args, named))
        if name in _SIZE_QUERIES:
            varying = [tensor for tensor in inputs if self.is_data_dependent(tensor)]
        else:
            varying = [tensor for tensor in inputs if not self.is_fixed(tensor)]
            if is_constant is not None:
                varying = [tensor for tensor in varying if not is_constant(tensor)]
        may_be_fixed = not (varying or self.has_read_numbers or name in _UNINITIALIZED)
        states = generator_states() if may_be_fixed else None
        output = function(*args, **named)
        outputs = tensors_in(output)
        if may_be_fixed and states == generator_states():
            if inputs or is_constant is not None:
                self.mark_fixed(outputs)
            else:
                self._plain.update({id(tensor): tensor for tensor in outputs})
        if varying and (name in _SHAPING or any(map(self.is_data_dependent, varying))):
            self.is_trial_run = True
            try:
                with paddle.no_grad():
                    self._track_outputs(function, (args, named), set(map(id, varying)), outputs)
            finally:
                self.is_trial_run = False
        return output

    def _track_outputs(
        self, function: Function, arguments: Nest, varying: set[int], outputs: list[Tensor]
    ) -> None:
        """Records which outputs of an operation have data-dependent sizes.

        If that cannot be told from the operation's name, it runs again on substitutes. ``varying``
        has the ids of the inputs whose numbers depend on the batch.
        """
        name = getattr(function, "__name__", "").strip("_")
        args, named = arguments
        first = _SELECTING.get(name, _RESIZING.get(name, 0))
        deciding = [
            tensor
            for tensor in tensors_in((args[first:], named))
            if id(tensor) in varying and id(tensor) not in self._plain
        ]
        if name in _SELECTING and deciding:
            return self._store_substitutes(outputs, [_longer(tensor) for tensor in outputs])
        if name in _RESIZING:
            takes_only_sizes = _RESIZING[name] == 0
            if any(takes_only_sizes or tensor.dtype in _INTEGER_DTYPES for tensor in deciding):
                return self._store_substitutes(outputs, None)
        index: tuple[Any, ...] = ()
        if name == "getitem_dygraph":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
        slice_ends = tensors_in([item for item in index if isinstance(item, slice)])
        if any(id(tensor) in varying for tensor in slice_ends):
            return self._store_substitutes(outputs, None)
        masks = [
            tensor
            for tensor in tensors_in([item for item in index if not isinstance(item, slice)])
            if tensor.dtype == paddle.bool and id(tensor) in varying
        ]
        substitutes = {
            key: self._data_dependent[key][1] for key in varying if key in self._data_dependent
        }
        writes = name == "setitem_dygraph" or function.__name__.endswith("_")
        if not (substitutes or masks) or (writes and not self.is_data_dependent(args[0])):
            return None
        if any(substitute is None for substitute in substitutes.values()):
            return self._store_substitutes(outputs, None)
        for fill in (paddle.ones_like, paddle.zeros_like):
            masked = {id(mask): fill(substitutes.get(id(mask), mask)) for mask in masks}
            other_outputs = _run_on_substitutes(function, arguments, {**substitutes, **masked})
            if other_outputs is None or [*map(_shape, other_outputs)] != [*map(_shape, outputs)]:
                break
        if masks and other_outputs is not None:
            # Some operations fail on an empty tensor, so the substitute is one row longer.
            other_outputs = [
                _longer(output, _shape(other)) for output, other in zip(outputs, other_outputs)
            ]
        return self._store_substitutes(outputs, other_outputs)

    def _store_substitutes(self, outputs: list[Tensor], other_outputs: list[Tensor] | None) -> None:
        """Records the outputs that have other shapes than their substitutes as data-dependent.

        With None for ``other_outputs`` the substitutes are unknown: all outputs are data-dependent.
        """
        for output, other in zip(outputs, other_outputs or [None] * len(outputs)):
            if _shape(output) and (other is None or _shape(other) != _shape(output)):
                self._data_dependent[id(output)] = (output, other)
            else:
                self._data_dependent.pop(id(output), None)


def _shape(tensor: Tensor) -> list[int]:
    """Returns the shape of a tensor as a list of its own."""
    return list(tensor.shape)


def _longer(tensor: Tensor, other_shape: Sequence[int] | None = None) -> Tensor:
    """Returns zeros in a tensor's shape, with one row more.

    With a non-empty ``other_shape`` it has one element more in each dimension in which the two
    shapes differ instead.
    """
    shape = _shape(tensor)
    if other_shape:
        shape[: len(other_shape)] = [a + (a != b) for a, b in zip(shape, other_shape)]
    else:
        shape[:1] = [size + 1 for size in shape[:1]]
    return paddle.zeros(shape, tensor.dtype)


def _run_on_substitutes(
    function: Function, arguments: Nest, substitutes: Mapping[int, Tensor]
) -> list[Tensor] | None:
    """Runs an operation on substitutes of its inputs, given by the inputs' ids.

    Returns:
        The outputs; None if the operation fails.
    """
    args, named = map_parts(arguments, lambda leaf: substitutes.get(id(leaf), leaf))
    try:
        return tensors_in(function(*args, **named))
    except Exception:
        # The operation may fail on other sizes than the batch's.
        return None
