"""Numbers of all ranks by Fleet's own functions, sums of halves, and norms by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.errors import UsageError
from fleetpipe.job.job import current_job
from tests.jobs import begun, job
from tests.pipelines import mlp_and_sgd

FROM_BEFORE = paddle.nn.utils.clip_grad_norm_


def exchanged() -> list[Any]:
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
    assert on_ranks(exchanged, 2) == [wanted, wanted]


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
