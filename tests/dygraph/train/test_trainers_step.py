"""The step in three parts, and what a trainer that takes it asks for on the way."""

from __future__ import annotations

import types
from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.fleet.meta_parallel import PipelineDatasetPreprocessor
from tests.pipelines import batch, bits, job, mlp_and_sgd, model_in_job, pipeline, sgd, switch


def by_itself(model: Any, optimizer: Any, data: Any) -> Any:
    """A step as PaddleNLP's trainer takes it."""
    assert not model._dp_comm_overlap
    assert not model._sharding_comm_overlap
    assert not model._use_batch_p2p_comm
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
        with model_in_job(2) as model:
            clip = paddle.nn.ClipGradByGlobalNorm(0.1)
            adamw = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), grad_clip=clip)
            optimizer = fleet.distributed_optimizer(adamw)
            step = by_itself if in_parts else lambda m, o, data: m.train_batch(data, o)
            losses = [step(model, optimizer, batch(seed=s)).numpy().tobytes() for s in range(2)]
            model._p2p_helper.clear_meta_cache()
            evaluated = model.eval_batch(batch(seed=2), compute_loss=True).numpy().tobytes()
            found.append((losses, evaluated, bits(model.state_dict()), optimizer.gradient_norm))
    assert found[0] == found[1]


@pytest.mark.parametrize("delayed", [False, True])
def test_the_last_part_of_a_step_is_that_of_train_batch(delayed: bool) -> None:
    found = []
    for in_parts in (True, False):
        with job(2):
            switch(delay_scale_loss=delayed)
            model = pipeline()
            rate = paddle.optimizer.lr.StepDecay(0.5, step_size=1)
            inner = paddle.optimizer.Momentum(rate, parameters=model.parameters())
            optimizer, losses = fleet.distributed_optimizer(inner), []
            for seed in range(3):
                if in_parts:
                    data = model._prepare_training(batch(seed=seed), optimizer, rate)
                    losses.append(model.forward_backward_pipeline(data))
                    model._optimizer_step()
                    assert all(
                        one.grad is None or not one.grad.any() for one in inner._parameter_list
                    )
                else:
                    losses.append(model.train_batch(batch(seed=seed), optimizer, rate))
            assert rate() == 0.5 * 0.1**3
            found.append(([loss.numpy().tobytes() for loss in losses], bits(model.state_dict())))
    assert found[0] == found[1]


def test_a_last_part_without_the_first_is_refused() -> None:
    with model_in_job(2) as model:
        model.forward_backward_pipeline(batch())
        with pytest.raises(StateError, match="no _prepare_training before"):
            model._optimizer_step()


def test_an_optimizer_of_another_model_is_refused_before_the_batch() -> None:
    with job(2):
        model, other = pipeline(), pipeline()
        with pytest.raises(ConfigError, match="wrong parameters"):
            model._prepare_training(batch(), sgd(other), None)
        with pytest.raises(ConfigError, match="wrapped for the pipeline"):
            model._prepare_training(batch(), sgd(model).wrapped, None)


def test_a_step_over_some_parameters_is_refused() -> None:
    refused = pytest.raises(ConfigError, match="all parameters of the optimizer")
    with model_in_job(2) as model, refused:
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
        # What PaddleFormers' Trainer puts there is nothing that a step calls.
        optimizer._insert_sync = lambda *_: pytest.fail("called")
        optimizer.step()


def test_a_trainer_may_log_the_norm_from_within_the_clip() -> None:
    logged = []

    def log(clip: Any, distributed: Any, whole: Any) -> None:
        assert isinstance(clip, paddle.nn.ClipGradByGlobalNorm)
        logged.append(float(paddle.sqrt(distributed + whole)))

    with model_in_job(2) as model:
        clip = paddle.nn.ClipGradByGlobalNorm(0.1)
        stock = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clip)
        optimizer = fleet.distributed_optimizer(stock)
        clip = optimizer._inner_opt._grad_clip
        clip._global_norm = types.MethodType(log, clip)
        for _ in range(2):
            model.train_batch(batch(), optimizer)
            assert logged[-1] == pytest.approx(optimizer.gradient_norm, rel=1e-6)
    assert len(logged) == 2


def test_data_that_a_function_gives_binds_the_optimizer_when_it_is_drawn() -> None:
    with mlp_and_sgd(2) as (model, optimizer):

        def prepared() -> Any:
            return model._prepare_training(batch(), optimizer, None)

        model.optimizer = model.lr_scheduler = None
        model._prepare_pipeline_inputs_func = prepared
        first = model.forward_backward_pipeline(PipelineDatasetPreprocessor(prepared))
        optimizer._step(model.parameters())
        optimizer.clear_grad()
        second = model.forward_backward_pipeline(PipelineDatasetPreprocessor(prepared))
        assert float(second) < float(first)
        with pytest.raises(ConfigError, match="wrapped for the pipeline"):
            model.forward_backward_pipeline(
                PipelineDatasetPreprocessor(
                    lambda: model._prepare_training(batch(), optimizer.wrapped, None)
                )
            )
