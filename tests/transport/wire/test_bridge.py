"""Tensors are read and filled where they lie, for every dtype and shape."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest

from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import TensorLeaf
from tests.transport.helpers import DTYPES, content, sample

SHAPES = [[], [1], [5], [2, 3], [0], [2, 0, 3]]


def through_memory(tensor: paddle.Tensor) -> paddle.Tensor:
    """Copies a tensor's bytes into a newly allocated one, as the socket does."""
    dtype = bridge.NAMES[tensor.dtype]
    leaf = TensorLeaf(dtype, tuple(tensor.shape), tensor.stop_gradient)
    _, sources = bridge.readable([tensor], [leaf])
    (filled,), targets = bridge.allocate([leaf])
    for source, target in zip(sources, targets):
        target[:] = source
    return filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape(dtype: str, shape: list[int]) -> None:
    tensor = sample(dtype, shape)
    assert content(through_memory(tensor)) == content(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [1 << 15, 1 << 20], ids=["medium", "large"])
def test_every_dtype_at_sizes_that_are_allocated_otherwise(dtype: str, numbers: int) -> None:
    tensor = sample(dtype, [numbers])
    assert content(through_memory(tensor)) == content(tensor)


def test_the_bytes_are_those_of_the_tensor() -> None:
    tensor = paddle.ones([4])
    (kept,), (memory,) = bridge.readable([tensor], [TensorLeaf("float32", (4,), True)])
    assert kept.data_ptr() == tensor.data_ptr()
    memory[:4] = b"\0\0\0\0"
    assert tensor.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_what_is_kept_outlives_the_tensor() -> None:
    tensor = paddle.ones([4]) * 3
    (kept,), (memory,) = bridge.readable([tensor], [TensorLeaf("float32", (4,), True)])
    tensor._clear_dataptr()
    assert bytes(memory) == paddle.full([4], 3.0).numpy().tobytes()
    assert kept.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose([1, 0]),
        lambda x: x[:, 1:3],
        lambda x: x[1:3],
        lambda x: x[::2],
        lambda x: x[:, 1],
        lambda x: x.transpose([1, 0])[2:],
    ],
)
def test_views_and_what_is_not_contiguous(view: Callable[[paddle.Tensor], paddle.Tensor]) -> None:
    tensor = view(paddle.arange(20, dtype="float32").reshape([4, 5]))
    assert content(through_memory(tensor)) == content(tensor)


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_a_filled_tensor_is_a_leaf_with_the_flag_of_the_sent_one(stop_gradient: bool) -> None:
    tensor = paddle.ones([2])
    tensor.stop_gradient = stop_gradient
    computed = tensor * 2
    filled = through_memory(computed)
    assert filled.is_leaf
    assert filled.stop_gradient == stop_gradient
    if not stop_gradient:
        (filled * 3).sum().backward()
        assert filled.grad.tolist() == [3.0, 3.0]
        assert tensor.grad is None


def test_small_tensors_do_not_share_memory() -> None:
    leaf = TensorLeaf("float32", (2,), True)
    (one, other), _ = bridge.allocate([leaf, leaf])
    assert one.data_ptr() != other.data_ptr()


def test_detached_shares_data() -> None:
    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    computed = tensor * 2
    (leaf,) = bridge.detach([computed])
    assert leaf.data_ptr() == computed.data_ptr()
    assert leaf.is_leaf
    assert not leaf.stop_gradient


def test_in_static_mode() -> None:
    tensor = sample("float32", [3, 4]).transpose([1, 0])
    expected = content(tensor)
    paddle.enable_static()
    try:
        program = paddle.static.default_main_program()
        before = str(program)
        large = through_memory(sample_in_dynamic_mode([1 << 19]))
        filled = through_memory(tensor)
        (leaf,) = bridge.detach([tensor])
        assert str(program) == before
    finally:
        paddle.disable_static()
    assert content(filled) == expected == content(leaf)
    assert large.numpy().sum() == 1 << 19


def sample_in_dynamic_mode(shape: list[int]) -> paddle.Tensor:
    from paddle.base.dygraph.base import guard

    with guard():
        return paddle.ones(shape)
