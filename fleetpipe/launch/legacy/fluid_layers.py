"""Functions of older Paddle's whose successors take other arguments, or are no part of PIR.

Each takes what the scripts of :mod:`~fleetpipe.launch.legacy.fluid` give it, by the names of then,
and makes layers of today, so that it stands in a program of either IR.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fleetpipe.aliases import Attribute, Variable
from fleetpipe.paddle_api import paddle

_Format = Literal["NCHW", "NHWC"]
_functional = paddle.nn.functional


def conv2d(
    input: Variable,
    num_filters: int,
    filter_size: int,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    act: str | None = None,
    name: str | None = None,
    data_format: _Format = "NCHW",
) -> Variable:
    """Convolves images with filters of its own."""
    layer = paddle.nn.Conv2D(
        _channels(input, data_format),
        num_filters,
        filter_size,
        stride,
        padding,
        groups=groups,
        weight_attr=param_attr,
        bias_attr=bias_attr,
        data_format=data_format,
    )
    return _activated(layer(input), act)


def batch_norm(
    input: Variable,
    act: str | None = None,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    data_layout: _Format = "NCHW",
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
) -> Variable:
    """Normalises each channel over a micro-batch, and learns its scale and offset."""
    layer = paddle.nn.BatchNorm(
        _channels(input, data_layout),
        param_attr=param_attr,
        bias_attr=bias_attr,
        data_layout=data_layout,
        moving_mean_name=moving_mean_name,
        moving_variance_name=moving_variance_name,
    )
    return _activated(layer(input), act)


def pool2d(
    input: Variable,
    pool_size: int = -1,
    pool_type: str = "max",
    pool_stride: int = 1,
    pool_padding: int = 0,
    global_pooling: bool = False,
    data_format: _Format = "NCHW",
) -> Variable:
    """Takes the largest number of each window of the images, or the mean; or of whole images."""
    maximum = pool_type == "max"
    if global_pooling:
        over = paddle.max if maximum else paddle.mean
        return over(input, [2, 3] if data_format == "NCHW" else [1, 2], keepdim=True)
    pooled = _functional.max_pool2d if maximum else _functional.avg_pool2d
    return pooled(input, pool_size, pool_stride, pool_padding, data_format=data_format)


def fc(
    input: Variable,
    size: int,
    param_attr: Attribute = None,
    bias_attr: Attribute = None,
    act: str | None = None,
) -> Variable:
    """Multiplies the rows, flattened, with a matrix of its own, and adds a bias."""
    return paddle.static.nn.fc(
        input, size, weight_attr=param_attr, bias_attr=bias_attr, activation=act
    )


def elementwise_add(
    x: Variable, y: Variable, act: str | None = None, name: str | None = None
) -> Variable:
    """Adds two values of one shape."""
    return _activated(paddle.add(x, y), act)


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    padding_idx: int | None = None,
    param_attr: Attribute = None,
) -> Variable:
    """Looks rows up in a table of its own: ``paddle.static.nn.embedding``, which PIR lacks."""
    rows, width = size
    layer = paddle.nn.Embedding(
        rows, width, padding_idx=padding_idx, sparse=is_sparse, weight_attr=param_attr
    )
    return layer(input)


def _channels(images: Variable, data_format: _Format) -> int:
    return int(images.shape[1 if data_format == "NCHW" else -1])


def _activated(value: Variable, act: str | None) -> Variable:
    return getattr(_functional, act)(value) if act else value
