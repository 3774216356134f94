"""Programs of MindSpore's: options, cells and stages, and Model.train beside the plain network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.nn import CrossEntropyLoss, Linear, Sequential

from fleetpipe import fleet
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.contrib.compat import mindspore
from fleetpipe.contrib.compat.mindspore import (
    LossMonitor,
    Model,
    ParallelMode,
    add_pipeline_stage,
    context,
    nn,
)
from fleetpipe.contrib.compat.mindspore.nn import stages_of_layers, stages_of_parameters
from fleetpipe.errors import BoundaryError, ConfigError, StateError, UsageError
from fleetpipe.job.job import current_job
from tests.contrib.compat.mindspore.networks import Net, TiedNet, batches, model_of, stages, words
from tests.fixtures import Capture
from tests.pipelines import accumulate, bits


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
    mindspore.set_context(mode=context.GRAPH_MODE, device_target="CPU", save_graphs=True)
    for name, value in (
        ("pipeline_stages", 2),
        ("parallel_mode", "semi_auto_parallel"),
        ("save_graphs", True),
    ):
        assert context.get_auto_parallel_context(name) == value
    with pytest.raises(ConfigError, match="did you mean 'full_batch'"):
        context.get_auto_parallel_context("full_batches")
    with pytest.raises(ConfigError, match="did you mean 'device_target'"):
        context.set_context(device_targets="CPU")


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


def test_stages_need_the_mode_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    context.set_auto_parallel_context(pipeline_stages=2)
    with pytest.raises(ConfigError, match="SEMI_AUTO_PARALLEL"):
        context.init()
    assert current_job() is None
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "3")
    context.set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL)
    with pytest.raises(ConfigError, match=r"\(=2\) does not divide the 3 processes"):
        context.init()


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
        # The job keeps its stages.
        with pytest.raises(StateError, match="cannot change while a job runs"):
            context.set_auto_parallel_context(pipeline_stages=3)
    finally:
        fleet.shutdown()


@pytest.mark.parametrize(
    ("stage", "kind"), [(True, TypeError), (1.0, TypeError), ("0", TypeError), (-1, ValueError)]
)
def test_a_stage_is_a_number(stage: Any, kind: Any) -> None:
    net = Net()
    with pytest.raises(kind, match="pipeline_stage is the number of a stage"):
        net.pipeline_stage = stage
    assert not hasattr(net, "pipeline_stage")
    with pytest.raises(kind, match="pipeline_stage is the number of a stage"):
        nn.add_pipeline_stage(net.head.weight, stage)
    # Paddle's own layers are looked at when stages are read.
    net.tail.pipeline_stage = stage
    with pytest.raises(kind) as caught:
        nn.infer_param_pipeline_stage(net)
    assert "where: tail" in str(caught.value)


def test_stages_that_are_missing_too_high_or_in_another_order_are_refused() -> None:
    net = Net()
    with stages():
        del net.tail.pipeline_stage
        with pytest.raises(StateError, match=r"without a stage: tail\.weight, tail\.bias"):
            net.infer_param_pipeline_stage()
        net.tail.pipeline_stage = 2
        with pytest.raises(ConfigError, match=r"tail\.weight in 2, tail\.bias in 2"):
            net.infer_param_pipeline_stage()
        net.head.pipeline_stage, net.tail.pipeline_stage = 1, 0
        with pytest.raises(ConfigError, match="'tail' is in stage 0"):
            model_of(net).train(1, batches(1))


def test_one_process_trains_all_stages_and_nothing_that_is_frozen() -> None:
    net = Net()
    with stages():
        assert net.infer_param_pipeline_stage() == net.parameters()
        net.head.bias.trainable = False
        names = [p.name for p in net.infer_param_pipeline_stage()]
    assert len(names) == 3
    assert net.head.bias.name not in names


def told(net: Any) -> dict[str, set[int]]:
    return {name: set(found) for name, _, found in stages_of_parameters(net)}


def test_names_stand_where_mindspores_programs_import_them() -> None:
    from fleetpipe.contrib.compat.mindspore.communication import get_group_size, get_rank, init
    from fleetpipe.contrib.compat.mindspore.nn import Momentum
    from fleetpipe.contrib.compat.mindspore.train import Model
    from fleetpipe.contrib.compat.mindspore.train.callback import LossMonitor

    assert (Model, LossMonitor) == (mindspore.Model, mindspore.LossMonitor)
    with stages():
        init()
        assert (get_rank(), get_group_size()) == (0, 1)
        net = Net()
        net.head.weight.stop_gradient = True
        assert [p.name for p in net.trainable_params()] == [
            p.name for p in (net.head.bias, net.tail.weight, net.tail.bias)
        ]
        twin = Net()
        twin.set_state_dict(net.state_dict())
        optimizers = (
            Momentum(net.trainable_params(), 0.1, 0.9, 0.01, use_nesterov=True),
            paddle.optimizer.Momentum(0.1, 0.9, twin.parameters()[1:], True, 0.01),
        )
        for _ in range(2):
            for model, optimizer in zip((net, twin), optimizers):
                model(batches(1)[0][0]).sum().backward()
                optimizer.step()
                optimizer.clear_grad()
        assert bits(net.state_dict()) == bits(twin.state_dict())


def test_the_inner_stage_counts_and_shared_parameters_have_several() -> None:
    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.one = Sequential(Linear(2, 2), Linear(2, 2))
            self.two = Linear(2, 2)
            self.two.weight = self.one[0].weight

    net = Outer()
    net.one.pipeline_stage = 0
    net.one[1].pipeline_stage = 1
    net.two.pipeline_stage = 2
    assert stages_of_layers(net) == {"one": 0, "one.1": 1, "two": 2}
    assert told(net) == {
        "one.0.weight": {0, 2},
        "one.0.bias": {0},
        "one.1.weight": {1},
        "one.1.bias": {1},
        "two.bias": {2},
    }
    nn.add_pipeline_stage(net.two.bias, 0)
    assert told(net)["two.bias"] == {0, 2}
    net.one[0].bias.add_pipeline_stage(1)
    assert told(net)["one.0.bias"] == {0, 1}


def test_the_loss_is_the_sum_over_micro_batches_in_order() -> None:
    net = Net()
    loss = nn.WithLossCell(net, CrossEntropyLoss())
    seen: list[int] = []
    net.head.register_forward_post_hook(lambda layer, given, out: seen.append(out.shape[0]))
    (inputs, labels) = batches(1, rows=32)[0]
    total = nn.PipelineCell(loss, 4)(inputs, labels)
    assert seen == [8] * 4
    parts = [loss(x, y) for x, y in zip(inputs.chunk(4), labels.chunk(4))]
    assert float(total) == float(parts[0] + parts[1] + parts[2] + parts[3])
    assert float(total) == pytest.approx(4 * float(loss(inputs, labels)), rel=1e-6)
    with pytest.raises(ConfigError, match=r"micro_size \(=5\) does not divide the 32 rows"):
        nn.PipelineCell(loss, 5)(inputs, labels)


@pytest.mark.parametrize(
    ("micro_size", "kind"),
    [(True, TypeError), (2.0, TypeError), ("2", TypeError), (0, ValueError), (-1, ValueError)],
)
def test_micro_size_is_a_number_of_micro_batches(micro_size: Any, kind: Any) -> None:
    loss = nn.WithLossCell(Net(), CrossEntropyLoss())
    with pytest.raises(kind, match="the number of micro-batches"):
        nn.PipelineCell(loss, micro_size)
    with stages(2), pytest.raises(ConfigError, match=r"stages \(=2\)\n  got: micro_size=1"):
        nn.PipelineCell(loss, 1)


def test_what_is_no_cell_is_refused() -> None:
    with pytest.raises(UsageError, match="takes a network with its loss"):
        nn.PipelineCell(Net(), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a network"):
        nn.WithLossCell(paddle.tanh, CrossEntropyLoss())
    with pytest.raises(UsageError, match="cannot be called"):
        nn.WithLossCell(Net(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Cell has no construct"):
        nn.Cell()(paddle.ones([1]))


def twin(net: Any) -> Any:
    other = type(net)()
    other.set_state_dict(net.state_dict())
    return other


def trained_alone(net: Any, data: list[Any], epochs: int = 1) -> list[float]:
    """Trains on the sum of the micro-batches' losses in one process; returns the losses."""
    cell = nn.WithLossCell(net, CrossEntropyLoss())
    momentum = paddle.optimizer.Momentum(0.05, 0.9, parameters=net.parameters())
    losses = []
    for inputs, labels in data * epochs:
        losses.append(float(accumulate(map(cell, inputs.chunk(4), labels.chunk(4)))))
        momentum.step()
        momentum.clear_grad()
    return losses


@pytest.mark.parametrize("scheduler", ["1f1b", "gpipe", "ZBH1"])
def test_a_network_trains_as_in_one_process(scheduler: str, capfd: Capture) -> None:
    auto = pytest.raises(ConfigError, match="`auto` was removed")
    with stages(2, pipeline_config={"pipeline_scheduler": "auto"}), auto:
        model_of(Net())
    with stages(2, pipeline_config={"pipeline_scheduler": scheduler}):
        net = Net()
        plain = twin(net)
        model = model_of(net)
        model.train(2, batches(3), callbacks=[LossMonitor(2)], dataset_sink_mode=True)
        losses = trained_alone(plain, batches(3), epochs=2)
        assert bits(net.state_dict()) == bits(plain.state_dict())
        told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("epoch")]
        # Of 6 batches every second one, with the loss that is the sum.
        assert told == [
            f"epoch: 1 step: 2, loss is {losses[1]}",
            f"epoch: 2 step: 1, loss is {losses[3]}",
            f"epoch: 2 step: 3, loss is {losses[5]}",
        ]


def test_looking_at_the_first_batch_begins_no_pass() -> None:
    class Counted(list[Any]):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return super().__iter__()

    with stages():
        data = Counted(batches(2))
        model = model_of(Net())
        model.build(data)
        model.train(3, data)
        assert data.passes == 3


def test_a_parameter_that_two_stages_use_is_declared_for_both() -> None:
    with stages():
        net = TiedNet()
        with pytest.raises(ConfigError, match=r"embed\.weight is used in stage 1"):
            model_of(net).train(1, words(1))
        add_pipeline_stage(net.embed.weight, 1)
        plain = twin(net)
        model_of(net).train(1, words(2))
        trained_alone(plain, words(2))
        for name, value in plain.state_dict().items():
            assert paddle.allclose(net.state_dict()[name], value, rtol=1e-5, atol=1e-6), name


def test_a_loss_that_is_no_number_stops(capfd: Capture) -> None:
    data = [batches(1)[0], (batches(1)[0][0] * float("inf"), batches(1)[0][1]), batches(1)[0]]
    with stages():
        with pytest.raises(BoundaryError, match="the loss is nan"):
            model_of(Net()).train(1, data, callbacks=LossMonitor(0))
        assert "epoch:" not in capfd.readouterr().out


def test_graphs_are_saved(tmp_path: Path) -> None:
    with stages(save_graphs=True, save_graphs_path=str(tmp_path)):
        model = model_of(Net())
        model.build(batches(1))
        home = tmp_path / "rank_0"
        texts = [(home / f"stage_{stage}.txt").read_text() for stage in (0, 1)]
        assert "head.weight [4, 6]" in texts[0]
        assert "tail.weight [6, 3]" in texts[1]
        # Each sublayer stands in one of the files, and the glue where it runs.
        assert [text.count("head  ") + text.count("tail  ") for text in texts] == [1, 1]
        assert "networks.py:" in texts[0]
        plan = (home / "plan.txt").read_text()
        assert plan.count("SF0>1.") == plan.count("RF0>1.") == 4
        assert json.loads((home / "schedule.json").read_text())["traceEvents"]


def test_what_does_not_fit_is_refused() -> None:
    with stages():
        model = model_of(Net())
        with pytest.raises(StateError, match="made of a first batch"):
            print(model.pipeline)
        with pytest.raises(ConfigError, match=r"micro_size \(=4\) does not divide the 6 rows"):
            model.train(1, batches(1, rows=6))
        with pytest.raises(UsageError, match="read anew in each epoch"):
            model.train(1, iter(batches(1)))
        with pytest.raises(UsageError, match="each item of the data"):
            model.train(1, [batches(1)[0][0]])
        with pytest.raises(UsageError, match="each item of the data"):
            model.train(1, [])
        for epoch, kind in ((True, UsageError), (1.0, UsageError), (0, ConfigError)):
            with pytest.raises(kind, match="epoch is a number of passes"):
                model.train(epoch, batches(1))
        with pytest.raises(UsageError, match=r"what to do: Model\(net_pipeline, optimizer=opt\)"):
            Model(model.train_network).train(1, batches(1))
        with pytest.raises(UsageError, match="cut into micro-batches"):
            Model(Net())  # type: ignore[arg-type]
