"""Options of MindSpore's: their rules, and the strategy and job that they make."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe import fleet
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.contrib.compat.mindspore import ParallelMode, context
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job.job import current_job
from tests.contrib.compat.mindspore.networks import stages


@pytest.fixture(autouse=True)
def usual() -> Any:
    context.reset_auto_parallel_context()
    yield
    context.reset_auto_parallel_context()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"pipeline_stages": True}, TypeError, "pipeline_stages is the number of ranks"),
        ({"pipeline_stages": 2.0}, TypeError, "pipeline_stages is the number of ranks"),
        ({"pipeline_stages": 0}, ValueError, "at least 1"),
        ({"parallel_mode": "semi_auto"}, ValueError, "did you mean 'semi_auto_parallel'"),
        ({"pipline_stages": 2}, ValueError, "did you mean 'pipeline_stages'"),
        ({"pipeline_config": {"pipeline_interleave": True}}, ValueError, "pipeline_interleave"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(options: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        context.set_auto_parallel_context(**options)
    assert context.options() == context.Options()


def test_options_are_set_one_by_one_and_told() -> None:
    context.set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL)
    context.set_auto_parallel_context(pipeline_stages=2, full_batch=True)
    assert context.get_auto_parallel_context("pipeline_stages") == 2
    assert context.get_auto_parallel_context("parallel_mode") == "semi_auto_parallel"
    with pytest.raises(ConfigError, match="did you mean 'full_batch'"):
        context.get_auto_parallel_context("full_batches")


@pytest.mark.parametrize(("mean", "scale"), [(True, "avg"), (False, "sum")])
def test_the_strategy_adds_up_micro_batches(mean: bool, scale: str) -> None:
    context.set_auto_parallel_context(
        parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL,
        pipeline_stages=2,
        gradients_mean=mean,
        pipeline_config={"pipeline_scheduler": "gpipe"},
    )
    strategy = context.options().strategy(4, 8)
    config = PipelineConfig.from_strategy(strategy)
    assert (config.micro_batches, config.micro_batch_size) == (4, 8)
    assert (config.schedule, config.loss_reduction) == ("FThenB", "sum")
    assert scale_strategy(strategy) == scale
    assert strategy.hybrid_parallel_order[:2] == ["pp", "dp"]


def test_stages_need_the_mode_that_knows_them() -> None:
    context.set_auto_parallel_context(pipeline_stages=2)
    with pytest.raises(ConfigError, match="SEMI_AUTO_PARALLEL"):
        context.init()
    assert current_job() is None


def test_the_job_has_the_stages_and_keeps_them() -> None:
    with stages(3):
        context.init()
        job = current_job()
        assert job is not None
        assert job.degrees.pp == 3
        with pytest.raises(StateError, match="cannot change while a job runs"):
            context.set_auto_parallel_context(pipeline_stages=2)


@pytest.mark.parametrize("steps", [1, 2])
def test_init_may_come_before_the_stages_as_in_the_tutorial(steps: int) -> None:
    mode = {"parallel_mode": ParallelMode.SEMI_AUTO_PARALLEL, "gradients_mean": True}
    context.set_context(mode=context.GRAPH_MODE, save_graphs=True)
    context.init()
    if steps == 2:
        context.set_auto_parallel_context(**mode)
    assert current_job() is None
    try:
        context.set_auto_parallel_context(pipeline_stages=2, **mode)
        job = current_job()
        assert job is not None
        assert job.degrees.pp == 2
    finally:
        fleet.shutdown()


def test_stages_that_do_not_divide_the_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "3")
    context.set_auto_parallel_context(
        parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, pipeline_stages=2
    )
    with pytest.raises(ConfigError, match=r"\(=2\) does not divide the 3 processes"):
        context.init()
