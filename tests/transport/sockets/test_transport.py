"""The contract of a transport, over sockets and memory alike, and what only one of them does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpipe.errors import BoundaryError, PeerFailed, PipelineTimeout, TransportError
from fleetpipe.transport import MemoryHub, MemoryTransport, MessageKey, SocketTransport, Transport
from tests.transport.helpers import (
    DTYPES,
    LIMIT,
    backward,
    forward,
    join_all,
    same,
    sample,
)

Join = Callable[..., list[SocketTransport]]

TENSORS = st.builds(
    sample, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31)
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), TENSORS),
    *(st.text(max_size=8), st.just("\ud800 é")),
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), values, max_size=3),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def lasting() -> Any:
    """Two connected ranks that a whole property uses."""
    transports = join_all(2)
    yield transports
    for transport in transports:
        transport.close()


@settings(max_examples=60)
@given(value=VALUES, flip=st.booleans())
def test_any_value_arrives_as_it_was(lasting: list[Transport], value: Any, flip: bool) -> None:
    if isinstance(value, paddle.Tensor):
        value.stop_gradient = flip
    source, target = (1, 0) if flip else (0, 1)
    lasting[source].send(target, forward(0), value)
    assert same(lasting[target].receive(source, forward(0), LIMIT), value)


def test_one_key_is_first_in_first_out(pair: list[Transport]) -> None:
    for number in range(5):
        pair[0].send(1, forward(0), number)
    assert [pair[1].receive(0, forward(0), LIMIT) for _ in range(5)] == list(range(5))


def test_keys_may_be_received_in_any_order(pair: list[Transport]) -> None:
    keys = [forward(0), forward(1), backward(0), forward(0, name="mask"), forward(0, 0, 2)]
    for number, key in enumerate(keys):
        pair[0].send(1, key, sample("float32", [number + 1]))
    for number, key in reversed(list(enumerate(keys))):
        assert pair[1].receive(0, key, LIMIT).shape[0] == number + 1


def test_try_receive_says_what_is_there(pair: list[Transport]) -> None:
    assert pair[1].try_receive(0, forward(0)) == (False, None)
    pair[0].send(1, forward(0), None)
    deadline = time.monotonic() + LIMIT
    while not (found := pair[1].try_receive(0, forward(0)))[0]:
        assert time.monotonic() < deadline
    assert found == (True, None)
    assert pair[1].try_receive(0, forward(0)) == (False, None)


def test_steady_steps_announce_nothing(pair: list[Transport]) -> None:
    """Each edge and direction is described once, however many micro-batches follow."""
    for step in range(3):
        for k in range(4):
            pair[0].send(1, forward(k), (sample("float32", [2, 3], seed=step), 7))
            pair[1].receive(0, forward(k), LIMIT)
            pair[1].send(0, backward(k), sample("float32", [2, 3]))
            pair[0].receive(1, backward(k), LIMIT)
    assert [transport.announcements for transport in pair] == [1, 1]
    assert [transport.messages for transport in pair] == [12, 12]
    assert [transport.bytes_sent for transport in pair] == [12 * 24, 12 * 24]


def test_a_changed_structure_is_announced_again(pair: list[Transport]) -> None:
    frozen, trained = sample("float32", [2]), sample("float32", [2])
    trained.stop_gradient = False
    values = [
        sample("float32", [2, 3]),
        sample("float32", [3, 2]),
        sample("float32", [3, 2]),
        sample("int32", [3, 2]),
        (sample("int32", [3, 2]), 1),
        (sample("int32", [3, 2]), 2),
        frozen,
        trained,
        trained,
    ]
    for k, value in enumerate(values):
        pair[0].send(1, forward(k), value)
        assert same(pair[1].receive(0, forward(k), LIMIT), value)
    assert pair[0].announcements == 7


def test_a_value_that_cannot_cross_leaves_the_channel_as_it_was(pair: list[Transport]) -> None:
    pair[0].send(1, forward(0), [1, 2])
    with pytest.raises(BoundaryError, match=r"value\[1\]") as raised:
        pair[0].send(1, forward(1), [1, object()])
    assert "F of edge 0>1, micro-batch 1 from rank 0 to rank 1" in str(raised.value)
    pair[0].send(1, forward(2), [1, 2])
    assert pair[1].receive(0, forward(0), LIMIT) == [1, 2]
    assert pair[1].receive(0, forward(2), LIMIT) == [1, 2]
    assert (pair[0].announcements, pair[0].messages) == (1, 2)


def test_what_was_sent_before_a_close_is_delivered(pair: list[Transport]) -> None:
    tensor = sample("float32", [1000])
    pair[0].send(1, forward(0), tensor)
    pair[0].close()
    pair[0].close()
    assert same(pair[1].receive(0, forward(0), LIMIT), tensor)
    with pytest.raises(PeerFailed, match="rank 0 has") as raised:
        pair[1].receive(0, forward(1), LIMIT)
    assert "F of edge 0>1, micro-batch 1 from rank 0 to rank 1" in str(raised.value)
    with pytest.raises(PeerFailed):
        pair[1].try_receive(0, forward(1))


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_peers_that_are_none_are_refused(pair: list[Transport], peer: int) -> None:
    with pytest.raises(TransportError, match=f"no connection to rank {peer}"):
        pair[0].send(peer, forward(0), 1)
    with pytest.raises(TransportError, match=f"no connection to rank {peer}"):
        pair[0].receive(peer, forward(0), 0.1)


@pytest.mark.parametrize(
    "key",
    [
        MessageKey("W", 0, 1, "", 0),
        MessageKey("F", -1, 1, "", 0),
        MessageKey("F", 0, 2**32, "", 0),
        MessageKey("F", 0, 1, b"mask", 0),
        MessageKey("F", 0, 1, "", 0.5),
    ],
)
def test_keys_that_are_none_are_refused(pair: list[Transport], key: MessageKey) -> None:
    with pytest.raises(TransportError, match="kind F, B, C or H"):
        pair[0].send(1, key, 1)


def test_a_micro_batch_that_no_header_holds_is_refused(sockets: Join) -> None:
    one, _ = sockets(2)
    one.send(1, forward(0), 1)
    with pytest.raises(TransportError, match="numbers from 0"):
        one.send(1, forward(2**32), 1)


@pytest.mark.parametrize("force_tcp", [False, True])
def test_both_may_send_much_before_either_receives(sockets: Join, force_tcp: bool) -> None:
    """Neither the sends nor the receives may wait for the other rank's thread."""
    pair = sockets(2, force_tcp=force_tcp)
    tensors = [paddle.arange(rank, 3 << 20) for rank in range(2)]
    for rank in range(2):
        for k in range(2):
            pair[rank].send(1 - rank, forward(k), tensors[rank])
    for rank in range(2):
        for k in (1, 0):
            assert same(pair[rank].receive(1 - rank, forward(k), LIMIT), tensors[1 - rank])
    for transport in pair:
        transport.flush(LIMIT)


def test_many_tensors_in_one_message(sockets: Join) -> None:
    one, other = sockets(2)
    value = [sample("int64", [3], seed=number) for number in range(3000)]
    one.send(1, forward(0), value)
    assert same(other.receive(0, forward(0), LIMIT), value)


def test_the_data_survives_what_the_sender_does_to_its_handle(sockets: Join) -> None:
    one, other = sockets(2)
    tensor = paddle.full([40 << 20], 3, "uint8")
    one.send(1, forward(0), tensor)
    tensor._clear_dataptr()
    del tensor
    filler = [paddle.full([40 << 20], 9, "uint8") for _ in range(2)]
    assert same(other.receive(0, forward(0), LIMIT), paddle.full([40 << 20], 3, "uint8"))
    del filler


def test_a_sender_waits_when_too_much_is_waiting(sockets: Join) -> None:
    """Memory stays bounded: about two kernel buffers and the backlog, then send() waits."""
    one, _ = sockets(2, timeout=0.5, backlog=1 << 20)
    large = paddle.zeros([1 << 20], "uint8")
    while not one.messages or one._connections[1].outbox.backlog < 1 << 20:
        one.send(1, forward(0), large)
    assert one.messages < 60
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout, match=r"could not send for 0\.5 s") as raised:
        one.send(1, forward(1), large)
    assert 0.4 < time.monotonic() - begin < LIMIT
    assert "bytes wait for rank 1" in str(raised.value)


def test_two_waiting_senders_read_what_the_other_sends(sockets: Join) -> None:
    """Both send more than buffers and backlog hold; reading meanwhile lets both go on."""
    pair = sockets(2, backlog=16 << 20)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for k in range(32):
                pair[rank].send(1 - rank, forward(k), paddle.full([1 << 20], k, "uint8"))
            for k in range(32):
                assert int(pair[rank].receive(1 - rank, forward(k), LIMIT)[-1]) == k
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    assert not failures


def test_a_third_rank_that_sends_too_much_is_not_read(
    sockets: Join,
) -> None:
    ranks = sockets(3, backlog=1 << 20)
    parts = 8
    sender = ThreadPoolExecutor(1)
    for k in range(parts):
        sender.submit(ranks[2].send, 1, forward(k), paddle.full([1 << 20], k, "uint8"))
    begin = time.process_time()
    with pytest.raises(PipelineTimeout):
        ranks[1].receive(0, forward(0), 0.5)
    assert time.process_time() - begin < 0.3
    assert ranks[1]._connections[2].inbox.nbytes < 3 << 20
    for k in range(parts):
        assert int(ranks[1].receive(2, forward(k), LIMIT)[0]) == k
    sender.shutdown()


def test_a_timeout_names_who_what_and_what_came_instead(sockets: Join) -> None:
    one, other = sockets(2)
    one.send(1, forward(4, name="mask"), 1)
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout) as raised:
        other.receive(0, forward(3), 0.2)
    assert 0.19 < time.monotonic() - begin < LIMIT
    message = str(raised.value)
    assert "rank 1 waited 0.2 s for a message of rank 0" in message
    assert "F of edge 0>1, micro-batch 3 from rank 0 to rank 1" in message
    assert "1 x F of edge 0>1:mask, micro-batch 4" in message


def test_the_death_of_a_third_rank_ends_a_wait(sockets: Join) -> None:
    ranks = sockets(3)
    death = threading.Timer(0.1, ranks[2].abandon)
    death.start()
    begin = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 2 is gone") as raised:
        ranks[1].receive(0, forward(0), LIMIT)
    assert time.monotonic() - begin < LIMIT / 2
    assert "from rank 0 to rank 1" in str(raised.value)
    death.join()


def test_the_reason_of_a_leaving_rank_reaches_the_others(sockets: Join) -> None:
    ranks = sockets(3)
    ranks[2].close("ValueError: out of data")
    for rank in range(2):
        with pytest.raises(PeerFailed, match="rank 2 has left: ValueError: out of data"):
            ranks[rank].receive(1 - rank, forward(0), LIMIT)
    with pytest.raises(PeerFailed, match="ValueError: out of data"):
        ranks[0].send(2, forward(0), 1)


def test_the_orderly_end_of_a_third_rank_ends_no_wait(sockets: Join) -> None:
    ranks = sockets(3)
    ranks[2].close()
    threading.Timer(0.2, ranks[0].send, (1, forward(0), 5)).start()
    assert ranks[1].receive(0, forward(0), LIMIT) == 5


def test_a_closed_transport_says_so(sockets: Join) -> None:
    one, _ = sockets(2)
    one.close()
    with pytest.raises(TransportError, match="transport of rank 0 is closed"):
        one.send(1, forward(0), 1)


@pytest.mark.parametrize("force_tcp", [False, True])
def test_close_delivers_what_waits_and_leaves_nothing(sockets: Join, force_tcp: bool) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    one, other = sockets(2, force_tcp=force_tcp)
    large = paddle.arange(4 << 20)
    one.send(1, forward(0), large)
    other.send(0, backward(0), 1)
    closing = threading.Thread(target=one.close)
    closing.start()
    assert same(other.receive(0, forward(0), LIMIT), large)
    closing.join(LIMIT)
    other.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_one_rank_alone(sockets: Join) -> None:
    (alone,) = sockets(1)
    alone.flush(0.1)


def test_in_static_mode(sockets: Join) -> None:
    one, other = sockets(2)
    value = {"x": sample("bfloat16", [3, 4]).transpose([1, 0]), "large": paddle.ones([1 << 19])}
    paddle.enable_static()
    try:
        before = str(paddle.static.default_main_program())
        one.send(1, forward(0), value)
        received = other.receive(0, forward(0), LIMIT)
        assert str(paddle.static.default_main_program()) == before
    finally:
        paddle.disable_static()
    assert same(received, value)


@pytest.fixture
def ranks() -> list[MemoryTransport]:
    hub = MemoryHub(3)
    return [hub.endpoint(rank) for rank in range(3)]


def test_a_tensor_is_shared_and_detached(ranks: list[MemoryTransport]) -> None:
    tensor = paddle.ones([4])
    tensor.stop_gradient = False
    computed = tensor * 2
    ranks[0].send(1, forward(0), (computed, 5))
    received, five = ranks[1].receive(0, forward(0), 0.0)
    assert received.data_ptr() == computed.data_ptr()
    assert received.is_leaf
    assert not received.stop_gradient
    assert five == 5


def test_containers_are_not_shared(ranks: list[MemoryTransport]) -> None:
    value = {"x": [1]}
    ranks[0].send(1, forward(0), value)
    value["x"].append(2)
    assert ranks[1].receive(0, forward(0), 0.0) == {"x": [1]}


def test_an_absent_message_is_an_error_at_once(ranks: list[MemoryTransport]) -> None:
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout, match="cannot come") as raised:
        ranks[1].receive(0, forward(3), 60.0)
    assert time.monotonic() - begin < 30.0
    assert "F of edge 0>1, micro-batch 3 from rank 0 to rank 1" in str(raised.value)
    assert "one thread" in str(raised.value)


def test_the_sender_is_part_of_the_address(ranks: list[MemoryTransport]) -> None:
    ranks[0].send(2, forward(0), "from 0")
    ranks[1].send(2, forward(0), "from 1")
    assert ranks[2].receive(1, forward(0), 0.0) == "from 1"
    assert ranks[2].receive(0, forward(0), 0.0) == "from 0"


def test_nothing_is_sent_to_a_rank_that_has_closed(ranks: list[MemoryTransport]) -> None:
    ranks[0].close()
    with pytest.raises(PeerFailed, match="rank 0 has closed"):
        ranks[1].send(0, forward(0), 1)
