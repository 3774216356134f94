"""What a micro-batch costs beyond its layers: calls of own functions, the same on any machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from benchmarks.calls import counted
from fleetpipe import fleet
from fleetpipe.transport import MessageKey, SocketTransport
from tests.jobs import ROWS
from tests.pipelines import CLASSES, FEATURES, batch, job, pipeline, sgd

FEW, MANY = 16, 32


def layers() -> list[Any]:
    return [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]


def of_a_list(micro_batches: int) -> Callable[[], Any]:
    model = pipeline(layers())
    optimizer, data = sgd(model), batch(micro_batches)
    return lambda: model.train_batch(data, optimizer)


def of_a_captured_model(micro_batches: int) -> Callable[[], Any]:
    data, spec = batch(micro_batches), {"2": fleetpipe.SplitPoint.BEGINNING}
    loss, plain = nn.CrossEntropyLoss(), nn.Sequential(*layers())
    pipe = fleetpipe.pipeline(plain, data[0][:ROWS], loss, spec, verify=False)
    model = fleet.distributed_model(pipe)
    optimizer = sgd(model)
    return lambda: model.train_batch(data, optimizer)


def of_fit(micro_batches: int) -> Callable[[], Any]:
    model = fleetpipe.Model(layers())
    model.prepare(paddle.optimizer.SGD(parameters=model.parameters()), nn.CrossEntropyLoss())
    data = paddle.io.TensorDataset(batch(micro_batches))
    return lambda: model.fit(data, batch_size=len(data), verbose=0)


#: What trains, its option for sums, and the most calls for a micro-batch on both ranks together.
WAYS = {
    "list": (of_a_list, "running", 102),
    "captured": (of_a_captured_model, "running", 189),
    "tree": (of_a_list, "tree", 120),
    "fit": (of_fit, "running", 107),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_micro_batch_makes_few_calls(way: str) -> None:
    make, sums, most = WAYS[way]
    calls = []
    for micro_batches in (FEW, MANY):
        with job(2, micro_batches, sums=sums):
            step = make(micro_batches)
            step()
            calls.append(counted(step)["calls"])
    # Far fewer would say that the functions are not recognized.
    assert most / 2 < (calls[1] - calls[0]) / (MANY - FEW) <= most


@pytest.mark.parametrize("packed", [False, True])
def test_a_small_message_is_one_send_and_one_receive(packed: bool) -> None:
    """The value of an edge of one tensor, or what goes back over it: a tuple of one."""
    ends = socket.socketpair()
    first, second = (SocketTransport(n, 2, {1 - n: end}, timeout=9) for n, end in enumerate(ends))
    tensor = paddle.ones([ROWS, FEATURES])
    value = (tensor,) if packed else tensor
    keys = [MessageKey("F", 0, 1, "", number) for number in range(16)]

    def exchange(messages: list[MessageKey]) -> None:
        for key in messages:
            first.send(1, key, value)
            assert second.try_receive(0, key)[0]

    exchange(keys)
    # Tensors are made for so many messages at once.
    counts = counted(lambda: exchange(keys[:8]))
    first.close()
    second.close()
    assert counts["system calls"] == 2 * 8
    assert counts["bytes copied"] == 8 * ROWS * FEATURES * 4
    assert counts["calls"] <= 8 * 31
