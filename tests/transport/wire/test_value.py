"""What may cross: values, taken apart, tensors where they lie, and streams under a secret."""

from __future__ import annotations

import collections
import enum
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, PeerFailed, TransportError
from fleetpipe.transport import SocketTransport, connect
from fleetpipe.transport.handshake import accepting_side, connecting_side, user_secret
from fleetpipe.transport.peer_connections import join
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import MOST_PARTS, Unfit, take_apart
from fleetpipe.transport.wire.structure import (
    DEEPEST,
    MessageKey,
    Route,
    Seal,
    Seals,
    Structure,
    TensorLeaf,
)
from tests.fixtures import Patch
from tests.transport.helpers import (
    DTYPES,
    LIMIT,
    ThreadStore,
    backward,
    content,
    forward,
    join_all,
    same,
    sample,
)
from tests.transport.joining.test_handshake import talk


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


def refusal(value: Any) -> str:
    with pytest.raises(Unfit) as raised:
        take_apart(value)
    return str(raised.value.error(Route(MessageKey("F", 0, 1, "", 3), 0, 1)))


def test_a_value_is_its_structure_and_its_tensors() -> None:
    x, y = paddle.ones([2, 3]), paddle.zeros([], "int64")
    y.stop_gradient = False
    value = {"b": [x, None, (True, 1, 2.5)], "a": y, "text": "t", "empty": ()}
    tree, tensors = take_apart(value)
    assert tree == (
        "dict",
        ("b", ("list", ("tensor", "float32", (2, 3), True), ("none",),
               ("tuple", ("bool", True), ("int", "0x1"), ("float", "2.5")))),
        ("a", ("tensor", "int64", (), y.stop_gradient)),
        ("text", ("str", "t")),
        ("empty", ("tuple",)),
    )  # fmt: skip
    assert [id(tensor) for tensor in tensors] == [id(x), id(y)]
    assert same(Structure(tree).rebuild(tensors), value)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([], ()), ("1", 1)])
def test_structures_tell_equal_values_of_different_types_apart(one: Any, other: Any) -> None:
    assert take_apart(one)[0] != take_apart(other)[0]


def test_structures_of_nan_are_equal() -> None:
    assert take_apart(float("nan"))[0] == take_apart(float("nan"))[0]


@pytest.mark.parametrize(
    ("value", "place", "got"),
    [
        ({"mask": [np.zeros(2)]}, "value['mask'][0]", "numpy.ndarray"),
        ((1, {1, 2}), "value[1]", "of type set"),
        ([np.float64(1)], "value[0]", "numpy.float64"),
        ({"a": {3: 1}}, "value['a']", "the key 3 of type int"),
        (object(), "value cannot", "of type object"),
        ([Colour.RED], "value[0]", "Colour"),
        (Pair(1, 2), "value cannot", "Pair"),
        (collections.OrderedDict(), "value cannot", "collections.OrderedDict"),
        ([b"bytes"], "value[0]", "bytes"),
        (print, "value cannot", "builtin_function_or_method"),
    ],
)
def test_what_may_not_cross_is_named(value: Any, place: str, got: str) -> None:
    message = refusal(value)
    assert place in message
    assert got in message
    assert "a dense Tensor of any dtype" in message
    assert "F of edge 0>1, micro-batch 3 from rank 0 to rank 1" in message


def test_a_sparse_tensor_may_not_cross() -> None:
    sparse = paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [2])
    assert "value['x'] cannot" in refusal({"x": sparse})
    assert "not dense" in refusal({"x": sparse})


def test_a_tensor_without_data_may_not_cross() -> None:
    for clear in (paddle.Tensor._clear_dataptr, paddle.Tensor._clear_data):
        freed = paddle.ones([4]) * 2
        clear(freed)
        assert "freed" in refusal([freed])


def test_a_parameter_may_cross() -> None:
    parameter = paddle.nn.Linear(2, 3).weight
    assert take_apart(parameter)[0] == ("tensor", "float32", (2, 3), False)


def test_a_value_within_itself_is_refused() -> None:
    cycle = {}
    cycle["again"] = [cycle]
    message = refusal(cycle)
    assert "value['again'][0]['again']" in message
    assert f"more than {DEEPEST} deep" in message


def test_the_deepest_value_that_may_cross() -> None:
    value = 1
    for _ in range(DEEPEST):
        value = [value]
    take_apart(value)
    assert "deep" in refusal([value])


def test_a_value_of_too_many_parts_is_refused() -> None:
    doubled = [None]
    for _ in range(40):
        doubled = [doubled, doubled]
    assert f"more than {MOST_PARTS} parts" in refusal(doubled)


#: Of more than some bytes memory is allocated otherwise.
SHAPES = [[], [1], [5], [2, 3], [0], [2, 0, 3], [1 << 15], [1 << 20]]


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


SECRET = "correct horse battery staple"
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def ends() -> Iterator[tuple[SocketTransport, SocketTransport, socket.socket, socket.socket]]:
    """Two sealed transports, between which the test carries the bytes."""
    mine, one = socket.socketpair()
    theirs, other = socket.socketpair()
    first = SocketTransport(
        0, 2, {1: mine}, timeout=LIMIT, seals={1: Seals(Seal(KEY), Seal(OTHER))}
    )
    second = SocketTransport(
        1, 2, {0: theirs}, timeout=LIMIT, seals={0: Seals(Seal(OTHER), Seal(KEY))}
    )
    for sock in (one, other):
        sock.settimeout(LIMIT)
    yield first, second, one, other
    for end in (one, other):
        end.close()
    for transport in (first, second):
        transport.close()


def test_messages_pass(monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_SECRET", SECRET)
    first, second, third = join_all(3)
    values = [None, 7, {"x": sample("float32", [300, 1000]), "y": sample("bool", [3])}, "text"]
    for k, value in enumerate(values):
        first.send(1, forward(k), value)
        third.send(1, forward(k), value)
        second.send(0, backward(k), value)
    for k, value in enumerate(values):
        assert same(second.receive(2, forward(k), LIMIT), value)
        assert same(second.receive(0, forward(k), LIMIT), value)
        assert same(first.receive(1, backward(k), LIMIT), value)
    first.close("enough")
    with pytest.raises(PeerFailed, match="rank 0 has left: enough"):
        second.receive(0, forward(9), LIMIT)
    for transport in (second, third):
        transport.close()


def test_without_a_secret_nothing_is_sealed() -> None:
    first, second = join_all(2)
    assert first._connections[1]._seal is None
    assert first._connections[1].inbox._seal is None
    first.close()
    second.close()


Ends = tuple[SocketTransport, SocketTransport, socket.socket, socket.socket]


def sent(ends: Ends, values: int) -> list[bytes]:
    """Has rank 0 send some values; returns the bytes of each message."""
    frames = []
    for k in range(values):
        ends[0].send(1, forward(k), sample("float32", [3], seed=k))
        frames.append(ends[2].recv(1 << 16))
    return frames


def refused(ends: Ends, micro_batch: int) -> None:
    with pytest.raises(TransportError, match="rank 0 sent bytes that are no message") as raised:
        ends[1].receive(0, forward(micro_batch), LIMIT)
    assert "does not have the seal" in str(raised.value)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_was_changed_on_the_way(where: float, bit: int) -> None:
    sending, receiving = Seal(KEY), Seal(KEY)
    part = bytearray(b"header and payload")
    seal = bytearray(sending.of([part]))
    whole = part + seal
    whole[int(where * len(whole))] ^= 1 << bit
    with pytest.raises(TransportError, match="does not have the seal"):
        receiving.check([whole[: len(part)]], whole[len(part) :])


@pytest.mark.parametrize("at", [0, 10, 50, 70, -30, -1])
def test_a_message_that_was_changed(ends: Ends, at: int) -> None:
    frame = bytearray(sent(ends, 1)[0])
    frame[at] ^= 1
    ends[3].sendall(frame)
    refused(ends, 0)


@pytest.mark.parametrize("order", [(0, 1, 1), (0, 2)], ids=["repeated", "left out"])
def test_messages_that_do_not_follow_each_other(ends: Ends, order: tuple[int, ...]) -> None:
    frames = sent(ends, 3)
    ends[3].sendall(b"".join(frames[k] for k in order))
    for k in order[:-1]:
        assert same(ends[1].receive(0, forward(k), LIMIT), sample("float32", [3], seed=k))
    refused(ends, order[-1])


def test_a_message_that_is_sent_back(ends: Ends) -> None:
    ends[2].sendall(sent(ends, 1)[0])
    with pytest.raises(TransportError, match="rank 1 sent bytes"):
        ends[0].receive(1, forward(0), LIMIT)


def test_each_connection_has_keys_of_its_own_that_both_ends_know() -> None:
    (*_, dialled), (*_, accepted), _ = talk(
        connecting_side(KEY, 1, 0, 2), accepting_side(KEY, 0, 2)
    )
    (*_, again), _, _ = talk(connecting_side(KEY, 1, 0, 2), accepting_side(KEY, 0, 2))
    seals = [dialled.outgoing.of([b"x"]), dialled.incoming.of([b"x"]), again.outgoing.of([b"x"])]
    assert len(set(seals)) == 3
    assert accepted.incoming.of([b"x"]) == seals[0]
    assert accepted.outgoing.of([b"x"]) == seals[1]


# The secret


def begin(store: ThreadStore, secrets: list[str]) -> list[Any]:
    """Connects ranks with these secrets; returns what each has or raised."""
    local = threading.local()

    def one(rank: int) -> Any:
        local.secret = secrets[rank].encode()
        try:
            return connect(
                rank=rank, ranks=len(secrets), store=store, namespace="test", timeout=LIMIT
            )
        except TransportError as error:
            return error

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(secrets)) as threads:
        patch.setattr("fleetpipe.transport.handshake.user_secret", lambda: local.secret)
        return list(threads.map(one, range(len(secrets))))


@pytest.mark.parametrize("secrets", [(SECRET, SECRET + "!"), (SECRET, ""), ("", SECRET)])
def test_ranks_with_other_secrets_say_so_at_once(secrets: tuple[str, str]) -> None:
    errors = begin(ThreadStore(), [*secrets])
    for error in errors:
        assert isinstance(error, TransportError)
        assert "were not given the same secret" in str(error)
    articles = ["a" if secret else "no" for secret in secrets]
    assert f"got: {articles[0]} secret on rank 0, {articles[1]} secret on rank 1" in str(errors[0])


def test_the_secret_is_not_in_the_store(
    monkeypatch: Patch,
) -> None:
    store = ThreadStore()
    for transport in begin(store, [SECRET, SECRET]):
        transport.close()
    assert SECRET not in str(store.values)
    assert SECRET.encode().hex() not in str(store.values)


def test_where_the_secret_is_from(monkeypatch: Patch, tmp_path: Path) -> None:
    assert user_secret() == b""
    file = tmp_path / "secret"
    monkeypatch.setenv("FLEETPIPE_SECRET_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot read FLEETPIPE_SECRET_FILE="):
        join(rank=0, ranks=2, store=ThreadStore(), namespace="test", timeout=LIMIT)
    file.write_text(SECRET + "\n")
    assert user_secret() == SECRET.encode()
    monkeypatch.setenv("FLEETPIPE_SECRET", SECRET[::-1])
    assert user_secret() == SECRET[::-1].encode()
    monkeypatch.setenv("FLEETPIPE_SECRET", "short")
    with pytest.raises(ConfigError, match="FLEETPIPE_SECRET is too short") as raised:
        user_secret()
    assert "short" not in str(raised.value).replace("too short", "")
