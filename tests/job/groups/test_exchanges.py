"""Paddle's own functions of groups on CPU ranks, which go over the ranks' connections."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from fleetpipe.errors import StateError, UsageError
from fleetpipe.job.groups.exchanges import Exchanges
from fleetpipe.mesh.groups import DirectGroup, Group
from tests import jobs
from tests.fixtures import Call
from tests.transport.helpers import LIMIT, join_all

RANKS = 3
SIZES = [[1, 2, 0], [0, 1, 1], [2, 0, 3]]


def rows(count: int, rank: int) -> Any:
    """Figures that tell from which rank and row they are."""
    return paddle.arange(count, dtype="float32") + 10.0 * rank


def exchanged() -> dict[str, list[Any]]:
    """What each of Paddle's functions gives this rank."""
    jobs.begin(dp=RANKS)
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
    jobs.fleet.shutdown()
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
