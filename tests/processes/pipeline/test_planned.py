"""Ranks that measured their own layers alone have one profile, one plan, and train by it."""

from __future__ import annotations

import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.profiling import PipelinePlan, Profile
from tests.fixtures import Call
from tests.pipelines import batch, job, mlp_layers, pipeline, sgd

M = 4


def planned() -> tuple[str, str, list[list[float]]]:
    """Profiles a model, plans, and trains without the plan and by it."""
    with job(2, micro_batches=M):
        model = pipeline(mlp_layers(hidden=64))
        profile = model.profile(batch(M))
        plan = fleetpipe.plan(profile, 2, M, search=("partition", "placement", "schedule"))
        losses = []
        for each in (model, pipeline(mlp_layers(hidden=64), plan=plan)):
            optimizer = sgd(each)
            losses.append([float(each.train_batch(batch(M, s), optimizer)) for s in range(3)])
        rank = paddle.distributed.get_rank()
        assert fleet.get_hybrid_communicate_group().get_stage_id() == rank
        return profile.dumps(), plan.dumps(), losses


def test_two_ranks_profile_plan_and_train(on_ranks: Call) -> None:
    first, second = on_ranks(planned, 2)
    assert first == second
    profile, plan = Profile.loads(first[0]), PipelinePlan.loads(first[1])
    assert len(profile.layers) == len(mlp_layers())
    assert profile.splits
    assert all(layer.forward > 0 for layer in profile.layers)
    assert [layer.parameters > 0 for layer in profile.layers] == [True, False] * 3 + [True]
    assert profile.loss is not None
    assert plan.ranks == 2
    plain, by_plan = first[2]
    assert plain == by_plan
