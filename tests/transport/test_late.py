"""The late transport shows what it is there to show."""

from __future__ import annotations

import paddle
import pytest

from fleetpipe.transport.wire.bridge import _import_shares
from tests.transport.helpers import forward, same, sample
from tests.transport.late import LateHub


def test_values_arrive_as_they_were() -> None:
    hub = LateHub(2)
    value = {"x": sample("float32", [2, 3]), "none": None, "flag": sample("bool", [])}
    hub.endpoint(0).send(1, forward(0), value)
    hub.endpoint(0).send(1, forward(1), value["x"])
    assert same(hub.endpoint(1).try_receive(0, forward(1))[1], value["x"])
    assert same(hub.endpoint(1).try_receive(0, forward(0))[1], value)


def test_a_tensor_that_is_changed_after_it_was_sent_is_named() -> None:
    hub = LateHub(2)
    tensor = sample("float32", [2])
    hub.endpoint(0).send(1, forward(3), tensor)
    tensor.add_(paddle.ones([2]))
    with pytest.raises(AssertionError, match="F of edge 0>1, micro-batch 3 was changed on rank 0"):
        hub.endpoint(1).try_receive(0, forward(3))


@pytest.mark.skipif(not _import_shares(), reason="this Paddle copies the arrays that it is given")
def test_memory_is_poisoned_as_soon_as_nothing_holds_it() -> None:
    hub = LateHub(2)
    hub.endpoint(0).send(1, forward(0), paddle.ones([4]))
    received = hub.endpoint(1).try_receive(0, forward(0))[1]
    view = received.reshape([2, 2])
    (block,) = hub.memory.blocks
    del received
    assert not (block == 0xFF).any()
    del view
    assert (block == 0xFF).all()
