"""Profiles a model on its ranks, plans, and trains by the plan; each rank writes what it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import paddle

import fleetpipe
from fleetpipe import fleet
from tests.jobs import job
from tests.pipelines import batch, mlp_layers, pipeline, sgd

M = 4


def main(folder: Path) -> None:
    with job(2, micro_batches=M):
        model = pipeline(mlp_layers(hidden=64))
        profile = model.profile(batch(M))
        plan = fleetpipe.plan(profile, 2, M, search=("partition", "placement", "schedule"))
        planned = pipeline(mlp_layers(hidden=64), plan=plan)
        losses = []
        for each in (model, planned):
            optimizer = sgd(each)
            losses.append([float(each.train_batch(batch(M, s), optimizer)) for s in range(3)])
        rank = paddle.distributed.get_rank()
        found = {"profile": profile.dumps(), "plan": plan.dumps(), "losses": losses}
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        assert fleet.get_hybrid_communicate_group().get_stage_id() == rank


if __name__ == "__main__":
    main(Path(sys.argv[1]))
