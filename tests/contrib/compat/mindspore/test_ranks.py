"""Stages on real ranks: who has which, who trains what, and the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.contrib.compat.mindspore import add_pipeline_stage, context
from tests.contrib.compat.mindspore.networks import Net, TiedNet, batches, model_of, stages, words
from tests.fixtures import Call

pytestmark = pytest.mark.once


def states(model: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.pipeline.layers.state_dict().items()}


def program(graphs: Path) -> dict[str, Any]:
    """A user's program on this rank, or in one process."""
    with stages(2, gradients_mean=True, save_graphs=True, save_graphs_path=str(graphs)):
        context.init()
        paddle.seed(3)
        hcg = fleet.get_hybrid_communicate_group()
        net = Net()
        names = {id(p): name for name, p in net.named_parameters()}
        trained = [names[id(p)] for p in net.infer_param_pipeline_stage()]
        model = model_of(net)
        model.train(1, batches(3))
        place = {"stage": hcg.get_stage_id(), "replica": hcg.get_data_parallel_rank()}
        found = {**place, "trained": trained, "state": states(model)}
    with stages(2, gradients_mean=True):
        paddle.seed(4)
        tied = TiedNet()
        add_pipeline_stage(tied.embed.weight, 1)
        model = model_of(tied)
        model.train(1, words(2))
        return {**found, "tied": states(model)}


def test_four_ranks_have_two_stages_in_two_replicas(on_ranks: Call, tmp_path: Path) -> None:
    whole = program(tmp_path / "one")
    ranks = on_ranks(program, 4, tmp_path / "four")
    # Stage s has the ranks 2s and 2s + 1: a pipeline is ranks 0 and 2, or 1 and 3.
    assert [(rank["stage"], rank["replica"]) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, last = ["head.weight", "head.bias"], ["tail.weight", "tail.bias"]
    assert [rank["trained"] for rank in ranks] == [first, first, last, last]
    # Both replicas are given the same rows here, of which the mean has the bits of one.
    assert ranks[0]["state"] == ranks[1]["state"]
    assert {**ranks[0]["state"], **ranks[3]["state"]} == whole["state"]
    # The table is on both stages, and stays equal there.
    tables = [rank["tied"]["embed.weight"] for rank in ranks]
    assert all(table == tables[0] for table in tables)
    np.testing.assert_allclose(tables[0], whole["tied"]["embed.weight"], rtol=1e-5)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/stage_*.txt"))
    assert files == [
        *(f"four/rank_{rank}/stage_{rank // 2}.txt" for rank in range(4)),
        *(f"one/rank_0/stage_{stage}.txt" for stage in range(2)),
    ]
