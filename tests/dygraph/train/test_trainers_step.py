"""The step in three parts, and what a trainer that takes it asks for on the way."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer

from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from tests.pipelines import batch, bits, job, pipeline, sgd


def by_itself(model: Any, optimizer: Any, data: Any) -> Any:
    """A step as PaddleNLP's trainer takes it."""
    assert not model._dp_comm_overlap
    assert not model._sharding_comm_overlap
    data = model._prepare_training(data, optimizer, None)
    model.optimizer = model.lr_scheduler = None
    loss = model.forward_backward_pipeline(data, None)
    assert isinstance(optimizer, HybridParallelOptimizer)
    assert optimizer._hcg is fleet.get_hybrid_communicate_group()
    for reduced_here in (optimizer._sharding_enable, optimizer._dp_enable, optimizer._sep_enable):
        assert not reduced_here
    optimizer._step(list(optimizer._inner_opt._parameter_list))
    for buffers in model._chunk_2_comm_buffers.values():
        pytest.fail(f"buffers: {buffers}")
    optimizer.clear_grad()
    return loss


def test_a_step_in_three_parts_has_the_bits_of_train_batch() -> None:
    found = []
    for in_parts in (True, False):
        with job(2):
            model = pipeline()
            clip = paddle.nn.ClipGradByGlobalNorm(0.1)
            adamw = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=clip)
            optimizer = fleet.distributed_optimizer(adamw)
            step = by_itself if in_parts else lambda m, o, data: m.train_batch(data, o)
            losses = [step(model, optimizer, batch(seed=s)).numpy().tobytes() for s in range(2)]
            model._p2p_helper.clear_meta_cache()
            evaluated = model.eval_batch(batch(seed=2), compute_loss=True).numpy().tobytes()
            found.append((losses, evaluated, bits(model.state_dict()), optimizer.gradient_norm))
    assert found[0] == found[1]


def test_an_optimizer_of_another_model_is_refused_before_the_batch() -> None:
    with job(2):
        model, other = pipeline(), pipeline()
        with pytest.raises(ConfigError, match="wrong parameters"):
            model._prepare_training(batch(), sgd(other), None)
        with pytest.raises(ConfigError, match="wrapped for the pipeline"):
            model._prepare_training(batch(), sgd(model).wrapped, None)


def test_a_step_over_some_parameters_is_refused() -> None:
    with job(2):
        model = pipeline()
        with pytest.raises(ConfigError, match="all parameters of the optimizer"):
            sgd(model)._step(model.parameters()[1:])


def test_no_method_of_fleets_optimizer_is_in_reach() -> None:
    inherited = {
        name
        for name, value in vars(HybridParallelOptimizer).items()
        if callable(value) and not name.startswith("__")
    }
    with job(2):
        optimizer = sgd(pipeline())
        assert {"_insert_sync", "_hybrid_sync_grad"} <= inherited
        reached = {name for name in inherited if hasattr(optimizer, name)}
        assert reached == {"step", "_step", "minimize"}
