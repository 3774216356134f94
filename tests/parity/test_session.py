"""Parity holds for a right pipeline, whatever a script sets, and names a wrong one's layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from fleetpipe import fleet, parity
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.dygraph.batch import micro_batches, stage_interfaces
from fleetpipe.dygraph.train import pipeline_parallel, training_batch
from fleetpipe.errors import CheckpointError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import ScaledLoss
from tests.fixtures import Patch
from tests.parity.test_defects import FORMS, compared, differences
from tests.pipelines import batch, job, mlp_layers, model_in_job, pipeline, sgd, switch


def after_steps(pipe: Any, optimizer: Any, steps: int = 3, **options: Any) -> parity.Report:
    session = parity.begin(pipe, optimizer, **options)
    for step in range(steps):
        session.step(batch(seed=step))
    return session.report


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B"])
def test_a_right_pipeline_is_bit_exact(ranks: int, schedule: str) -> None:
    with model_in_job(ranks, schedule=schedule) as model:
        report = after_steps(model, sgd(model))
    assert report.passed
    assert report.bit_exact
    assert report.single_loss == report.pipeline_loss
    assert (report.steps, len(set(report.pipeline_loss))) == (3, 3)
    assert report.verdict().endswith("bit-exact (losses, gradients and parameters)")


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: paddle.optimizer.Momentum(0.1, 0.9, parameters=ps, weight_decay=1e-3),
        lambda ps: paddle.optimizer.Adam(paddle.optimizer.lr.StepDecay(0.1, 1), parameters=ps),
        lambda ps: paddle.optimizer.AdamW(
            0.1,
            parameters=[
                {"params": ps[:2], "weight_decay": 0.1},
                {"params": ps[2:], "learning_rate": 0.5},
            ],
        ),
        lambda ps: paddle.optimizer.SGD(
            0.5, parameters=ps, grad_clip=nn.ClipGradByGlobalNorm(0.01)
        ),
    ],
)
def test_the_reference_gets_a_copy_of_any_optimizer(make: Any) -> None:
    with model_in_job(2) as model:
        optimizer = fleet.distributed_optimizer(make(model.parameters()))
        report = after_steps(model, optimizer)
        # What the optimizer keeps of these steps is the next copy's too.
        later = after_steps(model, optimizer)
    assert report.passed, report.verdict()
    assert report.pipeline_loss[0] != report.pipeline_loss[-1]
    assert later.passed, later.verdict()


class Rerun(nn.Layer):  # type: ignore[misc]
    """A layer whose sublayer Paddle calls again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return x + recompute(self.linear, x)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_layer_that_paddle_recomputes_is_called_once(schedule: str) -> None:
    with job(2, 2, schedule):
        linear = LayerDesc(nn.Linear, 6, 6)
        model = pipeline([linear, LayerDesc(Rerun), linear, LayerDesc(nn.Linear, 6, 4)])
        session = parity.begin(model, sgd(model))
        session.step(batch(2))
    assert session.report.bit_exact
    assert not session.report.differences, session.report.verdict()


@pytest.mark.parametrize("lost", [False, True])
def test_a_program_that_takes_a_batch_in_steps_is_compared(lost: bool) -> None:
    def train_batch(data: Any, optimizer: Any, *_: Any) -> Any:
        model._prepare_training(data, optimizer)
        loss = model.forward_backward_pipeline(data)
        if lost:
            model.parameters()[0].clear_gradient()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    with model_in_job(2) as model:
        report = after_steps(model, sgd(model), train_batch=train_batch)
    assert report.passed is not lost
    assert [found.name for found in report.differences[:1]] == ["0.weight"] * lost


def test_running_statistics_are_compared() -> None:
    layers = [LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 4)]
    with compared(3, layers=layers) as (model, session):
        session.step(batch())
        assert session.report.passed
        model.layers.state_dict()["1._mean"].set_value(paddle.zeros([8]))
        session.step(batch())
    assert not session.report.bit_exact
    assert any(found.name == "1._mean" for found in session.report.differences)


class LastOf(nn.Layer):
    """An LSTM keeps a buffer without any memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)

    def forward(self, value: Any) -> Any:
        return self.lstm(value.unsqueeze(1))[0][:, -1]


def test_a_model_with_an_lstm_is_compared() -> None:
    with model_in_job(3, layers=[LayerDesc(LastOf), *mlp_layers()[1:]]) as model:
        assert after_steps(model, sgd(model)).passed


def in_place() -> list[Any]:
    """Layers of which every other works in place; on three ranks a stage begins with each."""
    tanh_, relu_ = nn.functional.tanh_, nn.functional.relu_
    linear = [LayerDesc(nn.Linear, *sizes) for sizes in ((6, 8), (8, 8), (8, 4))]
    return [tanh_, linear[0], relu_, linear[1], tanh_, linear[2]]


def test_a_stage_that_begins_in_place_is_compared() -> None:
    with compared(3, layers=in_place(), seg_method=[0, 2, 4, 6]) as (_, session):
        session.step(batch())
        session.eval_batch(batch(), compute_loss=True)
        session.predict_batch(batch()[0])
    assert session.report.differences == []


def test_a_batch_whose_inputs_are_overwritten_is_run_again_to_look_at_its_edges() -> None:
    with model_in_job(3, layers=in_place(), seg_method=[0, 2, 4, 6]) as model:
        model.layers.state_dict()["3.weight"].register_hook(lambda grad: grad * 1.5)
        report = after_steps(model, sgd(model), steps=1)
    assert [d.name for d in report.differences] == ["3.weight", "", "3.weight"]


def test_parameters_that_are_frozen_later_are_compared() -> None:
    with compared(3) as (model, session):
        for frozen in (True, True, False):
            model.layers.state_dict()["2.weight"].stop_gradient = frozen
            session.step(batch())
    assert session.report.passed, session.report.verdict()


def test_a_loss_that_is_scaled_late_is_compared() -> None:
    with job(2, 3):
        switch(delay_scale_loss=True)
        model = pipeline()
        session = parity.begin(model, sgd(model))
        for seed in range(3):
            session.step(batch(3, seed))
    assert session.report.passed, session.report.verdict()


def test_several_losses_and_optimizers_by_turns_are_compared() -> None:
    def size(output: Any, _label: Any) -> Any:
        return (output**2).mean()

    with model_in_job(2, loss_fn=[nn.CrossEntropyLoss(), size]) as model:
        adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
        optimizers = [sgd(model), fleet.distributed_optimizer(adam)]
        session = parity.begin(model, optimizers[0])
        for step in range(4):
            session.train_with(optimizers[step % 2])
            single, losses = session.step(batch(seed=step))
            assert list(map(float, single)) == list(map(float, losses))
    assert session.report.passed, session.report.verdict()


class PlainMLP(nn.Layer):
    """The model of the tests as a user would write it for one device."""

    def __init__(self, activation: Any = nn.functional.tanh) -> None:
        super().__init__()
        self.body = nn.LayerList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)
        self.activation = activation

    def forward(self, x: Any) -> Any:
        x = self.activation(self.body[0](x))
        x = self.activation(self.body[1](x))
        return self.head(self.activation(self.body[2](x)))


def against(plain: Any, model: Any, steps: int = 2) -> parity.Report:
    optimizer = paddle.optimizer.SGD(0.1, parameters=plain.parameters())
    return after_steps(model, sgd(model), steps, model=plain, model_optimizer=optimizer)


def test_a_model_written_for_one_device_is_a_reference() -> None:
    with job(3):
        assert against(PlainMLP(), pipeline()).passed


def test_the_first_difference_is_that_of_the_first_layer() -> None:
    with job(3):
        report = against(PlainMLP(nn.functional.relu), pipeline())
    outputs = [d.name for d in report.differences if (d.quantity, d.step) == ("output", 0)]
    assert outputs == ["2, call 0", "4, call 0", "6, call 0"]
    first = report.differences[0]
    assert (first.quantity, first.name, first.step) == ("output", "2, call 0", 0)
    assert report.max_abs_diff > 0
    assert "output of 2" in report.verdict()
    assert report.verdict().splitlines()[-1].startswith("parity: FAILED")


def test_a_loss_that_is_trained_itself_is_refused() -> None:
    refused = pytest.raises(UsageError, match="loss without trained parameters")
    with model_in_job(2, loss_fn=ScaledLoss()) as model, refused:
        parity.begin(model, sgd(model))


def test_a_scaled_gradient_is_found_by_its_parameter() -> None:
    with model_in_job(3) as model:
        model.layers.state_dict()["2.weight"].register_hook(lambda grad: grad * 1.001)
        report = after_steps(model, sgd(model))
    first = report.differences[0]
    assert (first.quantity, first.name, first.step) == ("gradient", "2.weight", 0)
    assert first.relative == pytest.approx(1e-3, rel=0.1)
    found = {found.quantity for found in report.differences if found.step == 0}
    assert found == {"gradient", "gradient norm", "parameter"}
    assert not report.bit_exact


def test_a_wrong_step_is_found_in_the_parameters() -> None:
    with compared(2) as (model, session):
        parameter = model.layers.state_dict()["4.bias"]
        parameter.set_value(parameter + 1)
        session.step(batch())
        session.step(batch())
    assert not session.report.bit_exact
    found = [d for d in session.report.differences if d.quantity == "initial parameter"]
    assert session.report.failures[0] is found[0]
    assert [d.step for d in found] == [0]
    assert found[0].name.startswith("4.bias, changed outside of a step, before ")
    assert "test_session.py, line" in found[0].name


@pytest.mark.parametrize("from_step", [0, 1])
def test_a_layer_that_the_script_keeps_in_evaluation_is_so_in_the_reference(from_step: int) -> None:
    layers = [LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 4)]
    with compared(2, layers=layers) as (model, session):
        (norm,) = (one for one in model.layers.sublayers() if isinstance(one, nn.BatchNorm1D))
        for step in range(3):
            norm.train() if step < from_step else norm.eval()
            session.step(batch(seed=step))
        session.eval_batch(batch())
        session.step(batch())
    assert session.report.differences == []


def test_a_model_of_another_shape_is_refused() -> None:
    other_width = [*mlp_layers()[:-1], LayerDesc(nn.Linear, 8, 5)]
    for layers, message in ((other_width, r"head\.weight"), (mlp_layers(blocks=2), "same number")):
        with model_in_job(2, layers=layers) as model, pytest.raises(CheckpointError, match=message):
            parity.begin(model, sgd(model), PlainMLP(), None)


class Scale(nn.Layer):  # type: ignore[misc]
    """Scales by its attributes, and counts its calls in one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature: Any = 1.0
        self.weights = {"first": [1.0, 1.0]}
        self.activation: Callable[[Any], Any] = nn.functional.tanh
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.activation(self.linear(x)) / self.temperature
        return x * self.weights["first"][1] * (1 + self.calls)


def set_weight(layer: Scale) -> None:
    layer.weights["first"][1] = 0.5


def set_recursive_function(layer: Scale) -> None:
    def halve(x: Any, times: int = 2) -> Any:
        return halve(0.5 * x, times - 1) if times else x

    layer.activation = halve


CHANGES: dict[str, Callable[[Scale], None]] = {
    "number": lambda layer: setattr(layer, "temperature", 0.25),
    "tensor": lambda layer: setattr(layer, "temperature", paddle.to_tensor([0.5] * 8)),
    "list in a dict": set_weight,
    "function": lambda layer: setattr(layer, "activation", lambda x: x * 0.5),
    "function that calls itself": set_recursive_function,
}


def scales() -> list[Any]:
    ends = LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 8, 4)
    return [ends[0], LayerDesc(Scale), LayerDesc(Scale), ends[1]]


def scale_of(model: Any) -> Scale:
    return next(one for one in model.layers.sublayers() if isinstance(one, Scale))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step_of_change", [0, 2])
def test_a_changed_attribute_is_changed_in_the_reference(change: str, step_of_change: int) -> None:
    with compared(2, layers=scales()) as (model, session):
        for step in range(4):
            if step == step_of_change:
                CHANGES[change](scale_of(model))
            if step:  # of changes before the third step the evaluation is the first to know
                session.eval_batch(batch(seed=step), compute_loss=True)
                session.predict_batch(batch()[0])
            session.step(batch(seed=step))
    assert session.report.differences == [], session.report.verdict()


def changed_on_a_rank() -> tuple[bool, int]:
    """Changes the layers that this rank has; each rank compares with the whole model."""
    with compared(2, layers=scales()) as (model, session):
        for step in range(3):
            for layer in (one for one in model.layers.sublayers() if isinstance(one, Scale)):
                layer.temperature = 1 + step
            session.step(batch(seed=step))
    return session.report.bit_exact, session.report.steps


def test_ranks_get_the_attributes_of_other_ranks_layers(on_ranks: Callable[..., Any]) -> None:
    assert on_ranks(changed_on_a_rank, 2) == [(True, 3)] * 2


def test_what_a_batch_changes_in_an_attribute_is_not_copied() -> None:
    def train_batch(data: Any, optimizer: Any, *_: Any) -> Any:
        loss = model.train_batch(data, optimizer)
        scale_of(model).calls += 1
        return loss

    with model_in_job(2, layers=scales()) as model:
        session = parity.begin(model, sgd(model), train_batch=train_batch)
        for step in range(2):
            session.step(batch(seed=step))
    assert session.report.failures[0].step == 1
    assert (session.report.failures[0].quantity, session.report.passed) == ("output", False)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "loss": lambda session, rows: session.eval_batch([x[:rows] for x in batch()], True),
    "outputs": lambda session, rows: session.eval_batch([x[:rows] for x in batch()]),
    "prediction": lambda session, rows: session.predict_batch(batch()[0][:rows]),
}


def evaluated(call: Any, rows: int = 7, **options: Any) -> parity.Report:
    with compared(2, **options, layers=[*mlp_layers(), LayerDesc(nn.Dropout, 0.5)]) as (
        _model,
        session,
    ):
        session.step(batch())
        call(session, rows)
        session.step(batch())
        assert (session.report.steps, session.report.evaluations) == (2, 1)
        return session.report


@pytest.mark.parametrize("rows", [8, 7, 1])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_right_evaluations_pass_whatever_their_rows(call: Any, rows: int) -> None:
    report = evaluated(call, rows)
    assert report.passed, report.verdict()
    assert "compared 2 steps and 1 evaluations" in report.verdict()
    assert evaluated(call, rows, loss_reduction="sum").passed


def test_a_wrong_mean_of_the_evaluation_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(training_batch, "ragged_weights", lambda *_: None)
    report = evaluated(CALLS["loss"])
    assert differences(report) == [("loss", "eval_batch", 1)]
    assert "step 1: loss of eval_batch differs" in report.verdict()


def test_outputs_in_another_order_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(stage_interfaces, "sorted", lambda x: sorted(x)[::-1], raising=False)
    name = "eval_batch, micro-batch [0]"
    assert ("output", name, 1) in differences(evaluated(CALLS["outputs"]))
    assert ("output", "predict_batch", 1) in differences(evaluated(CALLS["prediction"]))


def test_outputs_that_are_joined_wrongly_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        pipeline_parallel, "join_outputs", lambda values: micro_batches.join_outputs(values[:-1])
    )
    assert differences(evaluated(CALLS["prediction"])) == [("output", "predict_batch", 1)]


def test_an_evaluation_in_training_mode_names_the_first_layer(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PipelineLayer, "eval", lambda self: None)
    with job(2):
        model = pipeline(
            [LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 4)]
        )
        session = parity.begin(model, sgd(model))
        session.eval_batch(batch(), True)
    assert differences(session.report)[0] == ("output", "1, call 0 of eval_batch", 0)
    assert ("loss", "eval_batch", 0) in differences(session.report)


@pytest.mark.parametrize("form", ["lists", "an iterator", "a preprocessor of an iterator"])
def test_an_evaluation_takes_every_form(form: str) -> None:
    with compared(2) as (_, session):
        session.eval_batch(FORMS[form](*batch()), True)
    assert session.report.passed, session.report.verdict()
