"""Cells and stages: MindSpore's rules, and the sum over micro-batches."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle.nn import CrossEntropyLoss, Linear, Sequential

from fleetpipe.contrib.compat import mindspore
from fleetpipe.contrib.compat.mindspore import context, nn
from fleetpipe.contrib.compat.mindspore.nn import stages_of_layers, stages_of_parameters
from fleetpipe.errors import ConfigError, StateError, UsageError
from tests.contrib.compat.mindspore.networks import Net, TiedNet, batches, stages
from tests.pipelines import bits


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


def test_parameters_without_a_stage_are_named() -> None:
    net = Net()
    del net.tail.pipeline_stage
    with stages(), pytest.raises(StateError, match=r"without a stage: tail\.weight, tail\.bias"):
        net.infer_param_pipeline_stage()


def test_a_stage_beyond_the_last_is_refused() -> None:
    net = Net()
    net.tail.pipeline_stage = 2
    with stages(), pytest.raises(ConfigError, match=r"tail\.weight in 2, tail\.bias in 2"):
        net.infer_param_pipeline_stage()


def test_one_process_trains_all_stages() -> None:
    net = Net()
    with stages():
        assert net.infer_param_pipeline_stage() == net.parameters()


def test_what_is_frozen_is_not_trained() -> None:
    net = Net()
    net.head.bias.trainable = False
    with stages():
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


def test_set_context_takes_what_is_mindspores_own() -> None:
    with stages():
        mindspore.set_context(mode=context.GRAPH_MODE, device_target="CPU", save_graphs=True)
        assert context.get_auto_parallel_context("save_graphs")
        with pytest.raises(ConfigError, match="did you mean 'device_target'"):
            context.set_context(device_targets="CPU")


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
    with pytest.raises(kind, match="the number of micro-batches"):
        nn.PipelineCell(nn.WithLossCell(Net(), CrossEntropyLoss()), micro_size)


def test_there_are_as_many_micro_batches_as_stages() -> None:
    loss = nn.WithLossCell(Net(), CrossEntropyLoss())
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


def test_a_parameter_used_in_a_stage_of_its_own_choice_is_declared() -> None:
    net = TiedNet()
    nn.add_pipeline_stage(net.embed.weight, 1)
    assert told(net)["embed.weight"] == {0, 1}
