"""Exchanges of a group: Paddle's functions, Fleet's, and neighbours that make communicators."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from fleetpipe import fleet
from fleetpipe.errors import StateError, UsageError
from fleetpipe.job import paddle_groups
from fleetpipe.job.exchanges import Exchanges
from fleetpipe.job.job import current_job
from fleetpipe.job.paddle_groups import directions
from fleetpipe.mesh.groups import DirectGroup, Group
from fleetpipe.transport import SocketTransport
from tests import pipelines
from tests.fixtures import Call, Patch
from tests.pipelines import begun, job, mlp_and_sgd
from tests.transport.conftest import sockets as sockets
from tests.transport.helpers import LIMIT, ThreadStore, forward, join_all, same, sample

RANKS = 3
SIZES = [[1, 2, 0], [0, 1, 1], [2, 0, 3]]


def rows(count: int, rank: int) -> Any:
    """Figures that tell from which rank and row they are."""
    return paddle.arange(count, dtype="float32") + 10.0 * rank


def exchanged() -> dict[str, list[Any]]:
    """What each of Paddle's functions gives this rank."""
    pipelines.begin(dp=RANKS)
    rank, got = dist.get_rank(), {}
    parts: list[Any] = []
    dist.stream.alltoall(parts, [rows(1, rank) + member for member in range(RANKS)])
    got["list"] = [part.item() for part in parts]
    out = paddle.zeros([RANKS * 2])
    dist.stream.alltoall(out, rows(RANKS * 2, rank))
    got["tensor"] = out.tolist()
    incoming = [SIZES[member][rank] for member in range(RANKS)]
    out = paddle.zeros([sum(incoming)])
    dist.stream.alltoall_single(
        out, rows(sum(SIZES[rank]), rank), in_split_sizes=SIZES[rank], out_split_sizes=incoming
    )
    got["single"] = out.tolist()
    out = paddle.zeros([1])
    dist.reduce_scatter(out, [paddle.full([1], [0.1, 1e8, -1e8][rank])] * RANKS)
    got["sum"] = [out.numpy().tobytes()]
    for kind in ("MAX", "MIN", "PROD"):
        task = dist.stream.reduce_scatter(
            out, rows(RANKS, rank + 1), op=getattr(dist.ReduceOp, kind), sync_op=False
        )
        task.wait()
        got[kind] = out.tolist()
    out = paddle.zeros([RANKS])
    dist.stream.all_gather(out, rows(1, rank), use_calc_stream=True)
    dist.stream.all_reduce(out, use_calc_stream=True)
    got["gathered"] = out.tolist()
    pair = dist.new_group([0, 2])
    if rank != 1:
        out = paddle.zeros([2])
        dist.stream.alltoall(out, rows(2, rank), group=pair)
        got["pair"] = out.tolist()
    pipelines.fleet.shutdown()
    return got


def test_paddles_functions_go_over_the_ranks_connections(on_ranks: Call) -> None:
    total = np.float32(0.1) + np.float32(1e8) + np.float32(-1e8)
    for rank, got in enumerate(on_ranks(exchanged, RANKS)):
        assert got["list"] == [10.0 * member + rank for member in range(RANKS)]
        two = [2 * rank, 2 * rank + 1]
        assert got["tensor"] == [10.0 * member + row for member in range(RANKS) for row in two]
        first = [sum(SIZES[member][:rank]) for member in range(RANKS)]
        assert got["single"] == [
            10.0 * member + first[member] + row
            for member in range(RANKS)
            for row in range(SIZES[member][rank])
        ]
        assert got["sum"] == [np.float32(total).tobytes()]
        figures = [10.0 * (member + 1) + rank for member in range(RANKS)]
        assert got["MAX"] + got["MIN"] == [max(figures), min(figures)]
        assert got["PROD"] == [np.prod(figures)]
        assert got["gathered"] == [0.0, 30.0, 60.0]
        assert got.get("pair", []) == {0: [0, 20], 1: [], 2: [1, 21]}[rank]


class Members(Exchanges):
    """The methods over connections between threads."""

    def __init__(self, group: DirectGroup) -> None:
        self._members = group

    def members(self) -> Group:
        return self._members


def test_what_does_not_fit_is_refused() -> None:
    transports = join_all(2)

    def refused(rank: int) -> bool:
        group = Members(DirectGroup(transports[rank], LIMIT))
        with pytest.raises(UsageError, match=r"2 sizes that add up to 3(.|\n)*\[1, 1\]"):
            group.all_to_all_single(paddle.zeros([2]), paddle.zeros([3]), [1, 1], [1, 1])
        with pytest.raises(UsageError, match=r"from member \d(.|\n)*shape \[2\](.|\n)*shape \[1\]"):
            group.all_to_all([paddle.zeros([2])] * 2, [paddle.zeros([1])] * 2).wait()
        task = group.reduce_scatter(paddle.zeros([1]), [rows(1, rank)] * 2, dist.ReduceOp.SUM)
        while not task.is_completed():
            pass
        return task.wait()

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(refused, range(2))] == [True, True]
    for transport in transports:
        transport.close()


def test_without_a_job_there_are_no_connections() -> None:
    with pytest.raises(StateError, match=r"neither alltoall nor reduce_scatter(.|\n)*fleet\.init"):
        Exchanges().all_to_all([], [])


FROM_BEFORE = paddle.nn.utils.clip_grad_norm_


def numbers_exchanged() -> list[Any]:
    """What rank r of two gets for r + 1."""
    with job(2):
        mine = fleet.worker_index() + 1
        got = [fleet.util.all_reduce(np.array([mine, 2.0 * mine]), mode) for mode in ("sum", "max")]
        got += [fleet.all_reduce(mine, mode) for mode in ("min", "mean")]
        got.append(fleet.util.all_gather(mine))
        fleet.barrier_worker()
        fleet.util.barrier()
        with pytest.raises(UsageError, match="mean"):
            fleet.util.all_reduce(mine, "meen")
        return [np.array(one).tolist() for one in got]


def test_fleets_functions_exchange_numbers_of_all_ranks(on_ranks: Any) -> None:
    wanted = [[3.0, 6.0], [2.0, 4.0], 1, 1.5, [1, 2]]
    assert on_ranks(numbers_exchanged, 2) == [wanted, wanted]


def halves() -> list[list[float]]:
    """The sums of two replicas in both dtypes of 16 bits, under an order that leaves axes out."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "order": ["pp", "dp"]}
    with begun(strategy):
        tensors = [paddle.to_tensor([0.5, 3.0]).astype(dtype) for dtype in ("float16", "bfloat16")]
        current_job().copies().all_reduce(tensors)
        return [tensor.astype("float32").tolist() for tensor in tensors]


def test_halves_are_added(on_ranks: Any) -> None:
    assert on_ranks(halves, 2) == [[[1.0, 6.0]] * 2] * 2


def norm_by_hand() -> list[str]:
    """What clipping by hand is told, by the name of now and by one from before the import."""
    told = []
    with mlp_and_sgd(2) as (model, _):
        for clip in (paddle.nn.utils.clip_grad_norm_, FROM_BEFORE):
            try:
                clip(iter(model.parameters()), 0.1)
            except UsageError as error:
                told.append(str(error))
        paddle.nn.utils.clip_grad_norm_(paddle.nn.Linear(2, 2).parameters(), 0.1)
    return told


def test_the_norm_of_a_stage_is_refused(on_ranks: Any) -> None:
    for told in on_ranks(norm_by_hand, 2):
        assert ["grad_clip=paddle.nn.ClipGradByGlobalNorm" in text for text in told] == [True, True]
    assert norm_by_hand() == []


#: A transfer that is over.
DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
#: Seconds after which a rank gives up whose peer does not come.
PATIENCE = 1.0


class Communicator:
    """A group of two ranks: its first transfer blocks until both have come, later ones do not."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)
        self._made: set[int] = set()
        self._sent: queue.Queue[paddle.Tensor] = queue.Queue()

    def isend(self, tensor: paddle.Tensor) -> Any:
        self._begin()
        self._sent.put(tensor)
        return DONE

    def irecv(self, tensor: paddle.Tensor) -> Any:
        self._begin()
        source = self._sent.get(timeout=PATIENCE)
        nbytes = int(source.size) * source.element_size()
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), nbytes)
        return DONE

    def _begin(self) -> None:
        if threading.get_ident() not in self._made:
            self._both.wait(PATIENCE)
            self._made.add(threading.get_ident())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_that_all_send_first_go_on(
    count: int, sockets: Callable[..., list[SocketTransport]], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(paddle_groups, "device_kind", lambda: "gpu")
    monkeypatch.setattr(paddle_groups, "isend_and_irecv", lambda made, _: (made.isend, made.irecv))
    groups = {direction: Communicator() for direction in directions(count)}
    connections, store = sockets(count), ThreadStore()
    everyone = threading.Barrier(count)

    def run(rank: int) -> bool:
        members, here = range(count), connections[rank]
        transport = paddle_groups.connect_neighbours(here, members, groups, store, "test", LIMIT)
        peers = {(rank + step) % count for step in (1, -1)} - {rank}
        everyone.wait(LIMIT)
        for peer in peers:
            transport.send(peer, forward(rank), sample("float32", [2], seed=rank))
        received = [transport.receive(peer, forward(peer), LIMIT) for peer in peers]
        transport.flush(LIMIT)
        return all(same(x, sample("float32", [2], seed=p)) for x, p in zip(received, peers))

    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(run, range(count))) == [True] * count
