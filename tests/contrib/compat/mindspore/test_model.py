"""Model.train against the plain network, whose micro-batches are added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.nn import CrossEntropyLoss

from fleetpipe.contrib.compat.mindspore import LossMonitor, Model, add_pipeline_stage, nn
from fleetpipe.errors import BoundaryError, ConfigError, StateError, UsageError
from tests.contrib.compat.mindspore.networks import Net, TiedNet, batches, model_of, stages, words
from tests.fixtures import Capture
from tests.pipelines import accumulate, bits


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


def test_a_sum_at_a_rate_is_a_mean_at_as_many_times_the_rate() -> None:
    with stages():
        net, plain = Net(), Net()
        plain.set_state_dict(net.state_dict())
        model_of(net, rate=0.05 / 4).train(1, batches(5))
        momentum = paddle.optimizer.Momentum(0.05, 0.9, parameters=plain.parameters())
        for inputs, labels in batches(5):
            CrossEntropyLoss()(plain(inputs), labels).backward()
            momentum.step()
            momentum.clear_grad()
        for name, value in plain.state_dict().items():
            assert paddle.allclose(net.state_dict()[name], value, rtol=1e-5, atol=1e-7), name


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


def test_stages_in_another_order_than_they_run_are_refused() -> None:
    net = Net()
    net.head.pipeline_stage, net.tail.pipeline_stage = 1, 0
    with stages(), pytest.raises(ConfigError, match="'tail' is in stage 0"):
        model_of(net).train(1, batches(1))


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
