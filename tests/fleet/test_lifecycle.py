"""fleet.init and fleet.shutdown in one process, and every option that is refused."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed import collective as _collective
from paddle.distributed import fleet as paddle_fleet

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, PeerFailed, StateError
from fleetpipe.fleet import lifecycle
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.job import paddle_groups, watch
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.amp import rehearsal_dtype
from tests.launching import command
from tests.pipelines import batch, begun, job, mlp_layers, pipeline, sgd

collective: Any = _collective


def strategy(**hybrid: int) -> Any:
    made = fleet.DistributedStrategy()
    made.hybrid_configs = hybrid
    return made


def test_one_process_answers_as_the_first_and_the_last_of_all_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with job(3):
        hcg = fleet.get_hybrid_communicate_group()
        assert hcg.get_stage_id() == 0
        assert hcg.get_pipe_parallel_world_size() == 3
        assert (hcg.is_first_stage, hcg.is_last_stage) == (True, True)
        assert hcg.topology().get_dim("pipe") == hcg._topo.get_dim("pipe") == 3
        assert hcg.get_parallel_mode() == paddle.distributed.ParallelMode.PIPELINE_PARALLEL
        assert (hcg.get_data_parallel_rank(), hcg.get_data_parallel_world_size()) == (0, 1)
        assert hcg.get_model_parallel_group().nranks == 1
        assert isinstance(hcg, fleet.HybridCommunicateGroup)
        assert (fleet.worker_index(), fleet.worker_num()) == (0, 1)
        assert paddle_fleet.fleet._hcg is hcg
        assert paddle_fleet.fleet._topology is hcg.topology()
        assert fleet.fleet.get_hybrid_communicate_group() is hcg
        assert (hcg._get_p2p_next_rank(), hcg._get_p2p_prev_rank()) == (0, 0)
        axes = fleet.CommunicateTopology().get_hybrid_group_names()
        assert hcg.topology().get_hybrid_group_names() == axes
    assert "plays all 3 ranks" in caplog.text


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_another_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each would train the whole model, and say that it plays all ranks."""
    monkeypatch.setenv(name, "3")
    with pytest.raises(ConfigError, match=rf"{name}=3, and no(.|\n)*fleetpipe run --nproc 3"):
        fleet.init(is_collective=True, strategy=strategy(pp_degree=3))
    monkeypatch.setenv(name, "1")
    with job(3):
        pass


def test_a_child_that_runs_the_script_again_is_told_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing\n"
        "from fleetpipe import fleet\n"
        "strategy = fleet.DistributedStrategy()\n"
        "strategy.hybrid_configs = {'pp_degree': 2}\n"
        "fleet.init(is_collective=True, strategy=strategy)\n"
        "child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "child.start()\n"
        "child.join()\n"
        "raise SystemExit(7 if child.exitcode else 0)\n"
    )
    done = command(sys.executable, script)
    assert done.returncode == 7, done.stderr
    assert "StateError: a process that multiprocessing started runs the script" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


def test_one_process_tells_of_no_groups_of_paddles(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = paddle_fleet.utils.log_util.logger
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    try:
        lifecycle._init_alone.__wrapped__(None, True, "INFO")
    finally:
        fleet.shutdown()
    assert not [line for line in lines if "pp_degree" in line or "comm group" in line]
    assert logger.level == logging.INFO


def test_a_topology_before_init_is_refused() -> None:
    with pytest.raises(StateError, match=r"call fleet\.init\(is_collective=True") as raised:
        fleet.get_hybrid_communicate_group()
    # Libraries' mixtures ask for it, and take what Paddle's Fleet raises for one device.
    assert isinstance(raised.value, AttributeError)


def test_whatever_ends_with_a_job_ends_where_one_part_of_it_fails() -> None:
    ended: list[int] = []

    def fail() -> None:
        raise OSError("no space left")

    fleet.init(is_collective=True, strategy=strategy(pp_degree=2))
    running = current_job()
    assert running is not None
    running.endings += [lambda: ended.append(1), fail, lambda: ended.append(2)]
    with pytest.raises(OSError, match="no space left"):
        fleet.shutdown()
    assert ended == [2, 1]
    assert current_job() is None
    assert paddle_fleet.fleet._hcg is None
    with job(3):
        assert pipeline().num_stages == 3


def test_a_process_whose_job_ends_in_an_error_ends_in_one_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(watch.os, "_exit", codes.append)

    def end(error: BaseException | None) -> None:
        raise PeerFailed("rank 1 died")

    monkeypatch.setattr(lifecycle.job, "end", end)
    lifecycle.end_with_process()
    assert codes == [watch.EXIT_CODE]
    assert capfd.readouterr().err == "PeerFailed: rank 1 died\n"


def test_gloo_groups_have_stores_of_their_own_as_long_as_asked_for() -> None:
    stock = collective._new_process_group_impl
    store: Any = None
    for _ in range(2):
        paddle_groups.separate_stores(store, 5.0)
        assert collective._new_process_group_impl.__wrapped__ is stock
    paddle_groups.share_store_again()
    paddle_groups.share_store_again()
    assert collective._new_process_group_impl is stock


def test_a_second_init_changes_the_strategy_and_refuses_other_degrees() -> None:
    with job(2):
        first = current_job()
        again = strategy(pp_degree=2)
        again.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
        fleet.init(is_collective=True, strategy=again)
        assert current_job() is first
        assert pipeline().accumulate_steps == 2
        with pytest.raises(ConfigError, match=r"fleet\.shutdown"):
            fleet.init(is_collective=True, strategy=strategy(pp_degree=3))


def test_a_strategy_of_paddles_own_works_too() -> None:
    stock = paddle_fleet.DistributedStrategy()
    stock.hybrid_configs = {"pp_degree": 2}
    stock.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    with begun(stock):
        model = pipeline()
        assert float(model.train_batch(batch(), sgd(model))) > 0


def test_the_options_survive_a_copy_and_merge() -> None:
    made = fleet.DistributedStrategy()
    made.fleetpipe_configs = {"timeout": 5}
    made.fleetpipe_configs = {"loss_reduction": "sum"}
    copied = copy.deepcopy(made)
    assert copied.fleetpipe_configs == made.fleetpipe_configs
    assert copied.fleetpipe_configs["timeout"] == 5
    assert copied.fleetpipe_configs["memory_cap"] is None
    assert fleet.DistributedStrategy().fleetpipe_configs["timeout"] is None


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"timout": 5}, "did you mean 'timeout'"),
        ({"loss_reduction": "average"}, "'mean', 'sum' or 'tokens'"),
        ({"rng": None}, "'keyed' or 'fleet'"),
        ({"rehearse": "float8"}, "'bfloat16' or 'float16'"),
        ({"fetch": "first"}, "'mean', 'last' or 'all'"),
        ({"groups": 4}, "no list of sizes"),
        ({"memory_cap": 0}, "at least 1"),
    ],
)
def test_an_option_of_fleetpipe_that_cannot_be_used_is_refused(
    configs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), job(2, **configs):
        pass
    assert current_job() is None


def test_a_rehearsal_lasts_as_long_as_the_job_or_is_refused_on_2_6() -> None:
    if VERSION.startswith("2."):
        with (
            pytest.raises(ConfigError, match="cannot rehearse bfloat16"),
            job(2, rehearse="bfloat16"),
        ):
            pass
    else:
        with job(2, rehearse="bfloat16"):
            assert paddle.amp.is_bfloat16_supported()
    assert current_job() is None
    assert rehearsal_dtype() is None


def test_a_schedule_is_known_by_its_aliases_and_an_unknown_one_refused_with_the_nearest() -> None:
    with job(2, schedule="F-then-B"):
        assert pipeline().schedule.name == "FThenB"
    with pytest.raises(ConfigError, match="FThenB"), job(2, schedule="FThanB"):
        pass


@pytest.mark.parametrize(
    ("hybrid", "world", "message"),
    [
        ({"pp_degree": 3}, 4, "do not divide the world size"),
        ({"pp_degree": 2, "dp_degree": 1}, 4, "dp_degree=2"),
        ({"pp_degree": 8}, 4, "--nproc_per_node 8"),
        ({"pp_degree": 2, "mp_degree": 3}, 4, "--nproc_per_node 6"),
        ({"pp_degree": 2, "mp_degree": 2}, 1, "--nproc 4 train.py"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_before_any_process_waits(
    hybrid: dict[str, int], world: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(world))
    with pytest.raises(ConfigError, match=message):
        fleet.init(is_collective=True, strategy=strategy(**hybrid))


def test_a_pipeline_outside_of_collective_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="is_collective=True"):
        fleet.init(strategy=strategy(pp_degree=2))


def test_a_model_that_is_no_pipeline_is_refused_with_the_right_import() -> None:
    with job(2):
        with pytest.raises(ConfigError, match=r"write the model as PipelineLayer"):
            fleet.distributed_model(nn.Linear(2, 2))
        stock = paddle_fleet.meta_parallel.PipelineLayer
        with pytest.raises(ConfigError, match=r"(?s)imported before.*fleetpipe\.install\(\)"):
            fleet.distributed_model(stock.__new__(stock))


def test_a_pipeline_before_init_is_refused() -> None:
    with pytest.raises(StateError, match=r"after fleet\.init"):
        fleet.distributed_model(PipelineLayer(mlp_layers(), num_stages=2))


def test_a_script_without_init_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process whose first call is this one.
    monkeypatch.delattr(paddle_fleet.fleet, "_user_defined_strategy", raising=False)
    with pytest.raises(StateError, match=r"call fleet\.init\(is_collective=True"):
        fleet.distributed_model(PipelineLayer(mlp_layers(), num_stages=2))


def test_stages_of_several_processes_are_not_built_before_init(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match=r"2 stages was built before fleet\.init"):
        PipelineLayer(mlp_layers(), num_stages=2)
    assert len(PipelineLayer(mlp_layers(), num_stages=1).run_function) == len(mlp_layers())


def test_stages_without_degrees_are_refused_with_the_step_that_is_missing() -> None:
    with job(1), pytest.raises(ConfigError, match=r"strategy\.hybrid_configs = \{'pp_degree'"):
        PipelineLayer(mlp_layers(), num_stages=2)


def test_a_list_with_a_foreign_entry_is_refused_by_its_place() -> None:
    with job(2):
        with pytest.raises(ConfigError, match="layer 1 of the list"):
            pipeline([LayerDesc(nn.Linear, 6, 6), 7])
        with pytest.raises(ConfigError, match=r"LayerDesc\(ReLU, \.\.\)"):
            pipeline([LayerDesc(nn.Linear, 6, 6), nn.ReLU])
        with pytest.raises(ConfigError, match="are a list"):
            pipeline(nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("loss", "found"),
    [(nn.MSELoss, "the class MSELoss"), ("mse", "'mse'"), ([nn.MSELoss(), 7], "got: 7")],
)
def test_a_loss_that_cannot_be_called_is_refused_when_the_model_is_built(
    loss: Any, found: str
) -> None:
    with job(2), pytest.raises(ConfigError, match=f"loss_fn is called[\\s\\S]*{found}"):
        pipeline(loss_fn=loss)


def test_a_job_without_a_pipeline_says_so_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with job(2):
        pipeline()
    assert "no pipeline ran" not in caplog.text
    with job(2):
        paddle.Model(nn.Linear(2, 2))
    assert "pp_degree is 2, and no pipeline ran in this job" in caplog.text
