"""The memory transport hands tensors over, counts as the socket does, and never waits."""

from __future__ import annotations

import time

import paddle
import pytest

from fleetpipe.errors import PeerFailed, PipelineTimeout
from fleetpipe.transport import MemoryHub, MemoryTransport
from tests.transport.helpers import forward


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


def test_endpoints_are_the_same_each_time() -> None:
    hub = MemoryHub(2)
    assert hub.endpoint(1) is hub.endpoint(1)


def test_the_sender_is_part_of_the_address(ranks: list[MemoryTransport]) -> None:
    ranks[0].send(2, forward(0), "from 0")
    ranks[1].send(2, forward(0), "from 1")
    assert ranks[2].receive(1, forward(0), 0.0) == "from 1"
    assert ranks[2].receive(0, forward(0), 0.0) == "from 0"


def test_nothing_is_sent_to_a_rank_that_has_closed(ranks: list[MemoryTransport]) -> None:
    ranks[0].close()
    with pytest.raises(PeerFailed, match="rank 0 has closed"):
        ranks[1].send(0, forward(0), 1)
