"""Handles tensors without memory: those of other ranks' stages, and of a lazy model.

A capture needs shapes, and no numbers: a node gets zeros while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.layers.entries import FIRST_SEED
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import (
    has_memory,
    is_parameter,
    is_state_of_cudnn,
    release_memory,
)


def without_memory(model: Layer) -> dict[str, Tensor]:
    """Returns the parameters of a model that have no memory, by name; buffers are left out."""
    state = model.state_dict().items()
    return {name: t for name, t in state if is_parameter(t) and not has_memory(t)}


@contextmanager
def lent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """While it is open, tensors without memory are zeros.

    Not the buffer of an LSTM that never has a value on a CPU: it would fail with one that was lent.
    """
    without = (tensor for tensor in tensors if not has_memory(tensor))
    borrowers = [tensor for tensor in without if not is_state_of_cudnn(tensor)]
    for tensor in borrowers:
        zeros = np.zeros(tensor.shape, str(tensor.dtype).rpartition(".")[2])
        tensor.get_tensor().set(zeros, paddle.CPUPlace())
    try:
        yield
    finally:
        release(borrowers)


def release(tensors: Iterable[Tensor]) -> None:
    """Frees the memory of tensors, which keep their shapes."""
    for tensor in tensors:
        if has_memory(tensor):
            release_memory(tensor)


def initialize(model: Layer, parameters: Mapping[str, Tensor]) -> None:
    """Sets the first values of parameters that were made under ``paddle.LazyGuard``.

    Each has a seed of its own by its place in the whole model, so that its value does not depend on
    which parameters a rank has.
    """
    with random_states_kept():
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            if name in parameters and is_parameter(tensor) and not has_memory(tensor):
                paddle.seed(FIRST_SEED + number)
                tensor.initialize()
