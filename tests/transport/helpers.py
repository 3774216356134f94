"""Stores, meshes and comparisons that the transport's tests share."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle

from fleetpipe.transport import MessageKey, SocketTransport, connect

DTYPES = [
    name
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    if hasattr(paddle, name)
]
LIMIT = 10.0


def forward(micro_batch: int, source: int = 0, target: int = 1, name: str = "") -> MessageKey:
    """Returns the key of an edge's value."""
    return MessageKey("F", source, target, name, micro_batch)


def backward(micro_batch: int, source: int = 0, target: int = 1, name: str = "") -> MessageKey:
    """Returns the key of an edge's gradient."""
    return MessageKey("B", source, target, name, micro_batch)


class ThreadStore:
    """The store of a job whose ranks are threads; like the real one, ``get`` may not be early."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        assert key in self.values, f"the real store would block for ever on {key}"
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]


def free_port() -> int:
    """Returns a port of this host that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def join_all(ranks: int, **options: Any) -> list[SocketTransport]:
    """Connects ``ranks`` ranks that are threads of this process."""
    store = ThreadStore()

    def join(rank: int) -> SocketTransport:
        given = {"timeout": LIMIT, "store": store, "namespace": "test", **options}
        return connect(rank=rank, ranks=ranks, **given)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(join, range(ranks)))


def sample(dtype: str, shape: list[int], seed: int = 0) -> paddle.Tensor:
    """Returns a tensor of any dtype whose bytes are all in use."""
    size = int(np.prod(shape))
    numbers = np.random.RandomState(seed).randint(-100, 100, size=size).reshape(shape)
    if dtype == "bool":
        return paddle.to_tensor(numbers % 2 == 0)
    if dtype.startswith("complex"):
        return paddle.to_tensor(
            (numbers + 1j * numbers[..., ::-1] if shape else numbers + 2j).astype(dtype)
        )
    if dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16"):
        return paddle.to_tensor(numbers.astype("float32")).astype(dtype)
    return paddle.to_tensor(numbers.astype(dtype))


def content(tensor: paddle.Tensor) -> tuple[Any, ...]:
    """Returns all that two tensors must have in common: dtype, shape, flag and bits."""
    wide = tensor.detach().astype("float32") if "float8" in str(tensor.dtype) else tensor.detach()
    bits = wide.view("int16") if wide.dtype == paddle.bfloat16 else wide
    return str(tensor.dtype), list(tensor.shape), tensor.stop_gradient, bits.numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Tells whether two values are equal to the last bit, types included."""
    if isinstance(one, paddle.Tensor):
        return isinstance(other, paddle.Tensor) and content(one) == content(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)
