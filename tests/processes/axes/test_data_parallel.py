"""Replicas of a pipeline: equal parameters, the gradients of the whole batch, groups by order."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.io import DistributedBatchSampler
from tests import pipelines
from tests.fixtures import Call
from tests.pipelines import CLASSES, FEATURES, ROWS, batch, bits, pipeline, sgd

STEPS = 8


def replicas(scale: str) -> dict[str, Any]:
    """Trains two replicas of two stages, and the single model on the rows of both."""
    paddle.seed(100 + paddle.distributed.get_rank())
    strategy = pipelines.strategy(2, dp=2, pp=2)
    strategy.gradient_scale_configs = {"scale_strategy": scale}
    fleet.init(is_collective=True, strategy=strategy)
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()

    # Built layers keep the values that each rank's own seed gave them.
    model = pipeline([nn.Linear(FEATURES, 8), nn.functional.tanh, nn.Linear(8, CLASSES)])
    start = model.layers.full_state_dict()
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        mine = [part[replica * 2 * ROWS :][: 2 * ROWS] for part in batch(4, step)]
        losses.append(model.train_batch(mine, optimizer))
    end = model.layers.full_state_dict()
    # Two thirds of the rows are of the first replica.
    unequal = slice(2 * ROWS) if replica == 0 else slice(2 * ROWS, 3 * ROWS)
    evaluated = model.eval_batch([part[unequal] for part in batch(4, STEPS)], compute_loss=True)

    single = model.layers.single_model()
    single.set_state_dict(start)
    plain = paddle.optimizer.SGD(0.1, parameters=single.parameters())
    whole = []
    for step in range(STEPS):
        inputs, labels = batch(4, step)
        loss = nn.functional.cross_entropy(single(inputs), labels)
        (loss * (2 if scale == "sum" else 1)).backward()
        plain.step()
        plain.clear_grad()
        whole.append(float(loss))
    expected = single.state_dict()
    inputs, labels = (part[: 3 * ROWS] for part in batch(4, STEPS))
    whole_evaluated = float(nn.functional.cross_entropy(single(inputs), labels))
    session = parity.begin(model, sgd(model))
    session.step(mine)
    fleet.shutdown()
    return {
        "losses": [float(loss) for loss in losses],
        "loss bits": [loss.numpy().tobytes() for loss in losses],
        "whole": whole,
        "evaluated": (float(evaluated), whole_evaluated),
        "gaps": [
            float((end[name] - value).abs().max() / value.abs().max())
            for name, value in expected.items()
        ],
        "state": bits(end),
        "moved": bits(start) != bits(end),
        "parity": (session.report.passed, session.report.tolerance, session.report.verdict()),
    }


def evaluated_with_a_frozen_head() -> str:
    """The reference takes what is not trained of the replica, as running statistics; in parts."""
    pipelines.begin(2, 2, dp=2)
    head = VocabularyHead(8, CLASSES, paddle.ParamAttr(trainable=False))
    model = pipeline([nn.Linear(FEATURES, 8), nn.functional.tanh, head], loss_fn=VocabularyLoss())
    session = parity.begin(model, sgd(model))
    session.eval_batch(batch(2), compute_loss=True)
    fleet.shutdown()
    return session.report.verdict()


def placed() -> dict[str, dict[str, Any]]:
    """Where this rank is, under two orders of the axes, and its samples."""
    found = {}
    for name, order in (("default", ()), ("pipeline first", ("pp", "dp"))):
        pipelines.begin(dp=-1, pp=2, axes=order)
        hcg = fleet.get_hybrid_communicate_group()
        found[name] = {
            "data": hcg.topology().get_comm_list("data"),
            "pipe": hcg.topology().get_comm_list("pipe"),
            "replica": hcg.get_data_parallel_rank(),
            "own": hcg.get_data_parallel_group().ranks,
            "samples": [list(batch) for batch in DistributedBatchSampler(range(16), 2)],
        }
        fleet.shutdown()
    return found


def everything() -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]], str]:
    """All jobs, one after another in the same processes."""
    return replicas("avg"), replicas("sum"), placed(), evaluated_with_a_frozen_head()


def test_replicas_train_as_one_device_on_the_whole_batch_in_both_orders(on_ranks: Call) -> None:
    averaged, added, places, verdicts = zip(*on_ranks(everything, 4, timeout=240))
    assert all("bit-exact" in verdict for verdict in verdicts), verdicts
    for rank in averaged:
        assert rank["state"] == averaged[0]["state"]
        assert rank["loss bits"] == averaged[0]["loss bits"]
        assert max(rank["gaps"]) < 1e-6
        assert np.allclose(rank["losses"], rank["whole"], rtol=1e-6, atol=0)
        assert rank["moved"]
        assert rank["evaluated"][0] == pytest.approx(rank["evaluated"][1], rel=1e-6)
        passed, tolerance, verdict = rank["parity"]
        assert passed, verdict
        assert tolerance == 0.0
        assert "bit-exact" in verdict
    for rank in added:
        assert max(rank["gaps"]) < 1e-6
        assert rank["parity"][0], rank["parity"][2]
    near, far = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    for order, expected in {"pipeline first": (near, far), "default": (far, near)}.items():
        found = [rank[order] for rank in places]
        assert (found[0]["data"], sorted(found[0]["pipe"])) == expected
        by_replica: dict[int, list[list[int]]] = {}
        for number, rank in enumerate(found):
            assert number in rank["own"]
            # Both stages of a pipeline see the same samples, other replicas see others.
            assert by_replica.setdefault(rank["replica"], rank["samples"]) == rank["samples"]
        samples = [index for seen in by_replica.values() for part in seen for index in part]
        assert sorted(samples) == list(range(16))
