"""Training in one process that plays all ranks, under every schedule, in one call or in three."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer

from fleetpipe import fleet, parity
from fleetpipe.errors import BoundaryError, ConfigError, StateError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineDatasetPreprocessor
from fleetpipe.schedules import names
from tests.dygraph.models import MODELS, Called, Model
from tests.pipelines import (
    adam,
    batch,
    bits,
    job,
    mlp_and_sgd,
    model_in_job,
    pipeline,
    sgd,
    switch,
    train,
    train_plainly,
)


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B", "Eager1F1B"])
def test_losses_and_parameters_have_the_bits_of_a_plain_loop(
    ranks: int, micro_batches: int, schedule: str
) -> None:
    found = train(None, ranks, schedule, micro_batches=micro_batches, steps=3)
    assert found == train_plainly(micro_batches, steps=3)


def test_the_sum_of_losses_is_not_divided() -> None:
    assert train(configs={"loss_reduction": "sum"}) == train_plainly(divisor=1)


def test_the_loss_has_the_shape_and_dtype_of_the_loss_function() -> None:
    with job(2):
        loss = (model := pipeline()).train_batch(batch(), sgd(model))
        assert (loss.shape, str(loss.dtype), loss.stop_gradient) == ([], "paddle.float32", True)

    def one_row(output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output, label).reshape([1]).astype("float64")

    with job(2):
        loss = (model := pipeline(loss_fn=one_row)).train_batch(batch(), sgd(model))
        assert (loss.shape, str(loss.dtype)) == ([1], "paddle.float64")


class Made(Called):
    """What is called with an input and the layers that functions make."""

    def __init__(self, call: Callable[..., Any], *makes: Callable[[], Any]) -> None:
        super().__init__(call, *(make() for make in makes))


def branch(x: Any, linear: Any) -> Any:
    """What may cross a border: nested containers, None, numbers, integers, two uses."""
    y = linear(x)
    return {"twice": [y, (y, None)], "the mask": x > 0, "step": 3, "constant": x.sum()}


def join(value: Any) -> Any:
    first, (second, nothing) = value["twice"]
    assert nothing is None
    assert value["the mask"].stop_gradient
    return first * value["step"] + second * value["the mask"].astype("float32")


def test_nested_values_cross_and_their_gradients_return() -> None:
    layers = [LayerDesc(Made, branch, lambda: nn.Linear(6, 6)), join, LayerDesc(nn.Linear, 6, 4)]
    assert train(layers, 1) == train(layers, 2) == train(layers, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_every_dtype_crosses_and_gradients_return_in_it(dtype: str) -> None:
    def cast(x: Any, linear: Any) -> Any:
        y = linear(x)
        return y, (4 * y).astype(dtype)

    def cast_back(value: Any, linear: Any) -> Any:
        plain, cast = value
        assert str(cast.dtype) == f"paddle.{dtype}"
        assert not plain.stop_gradient
        return linear(plain * cast.astype("float32"))

    layers = [
        LayerDesc(Made, cast, lambda: nn.Linear(6, 6)),
        LayerDesc(Made, cast_back, lambda: nn.Linear(6, 4)),
    ]
    assert train(layers, 1, gradients=True) == train(layers, 2, gradients=True)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_received_tensor_that_nobody_uses_has_no_gradient(schedule: str) -> None:
    pair = Called(lambda x, left, right: (left(x), right(x)), nn.Linear(6, 4), nn.Linear(6, 4))
    with model_in_job(2, schedule=schedule, layers=[pair, lambda value: value[1]]) as model:
        model.forward_backward_pipeline(batch())
        gradients = [parameter.grad is None for parameter in model.layers.parameters()]
        assert gradients == [True, True, False, False]


class GivesParameter(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([6])

    def forward(self, x: Any) -> Any:
        return nn.functional.tanh(x), self.scale


#: What the two stages in the middle of four do, which one rank has under a vee.
HANDED_ON: dict[str, list[Any]] = {
    "what it took": [lambda x: x, lambda x: x * 2],
    "a part of what it took": [lambda x: (x, 3), lambda pair: pair[0] * pair[1]],
    "its parameter": [LayerDesc(GivesParameter), lambda pair: pair[0] * pair[1]],
}


@pytest.mark.parametrize("kind", HANDED_ON)
@pytest.mark.parametrize(("ranks", "chunks", "schedule"), [(1, 4, "1F1B"), (2, 2, "ZBV")])
def test_a_stage_may_hand_on_what_it_did_not_make(
    kind: str, ranks: int, chunks: int, schedule: str
) -> None:
    layers = [LayerDesc(nn.Linear, 6, 6), *HANDED_ON[kind], LayerDesc(nn.Linear, 6, 4)]
    # In the first batch a stage runs on copies.
    found = train(layers, ranks, schedule, steps=3, num_virtual_pipeline_stages=chunks)
    assert found == train(layers, 1, steps=3)


def test_a_frozen_first_stage_trains_the_rest() -> None:
    with model_in_job(2, layers=[LayerDesc(nn.Linear, 6, 6), LayerDesc(nn.Linear, 6, 4)]) as model:
        for parameter in model.layers.parameters()[:2]:
            parameter.stop_gradient = True
        before = bits(model.layers.state_dict())
        model.train_batch(batch(), sgd(model))
        after = bits(model.layers.state_dict())
        assert [name for name in before if before[name] != after[name]] == ["1.weight", "1.bias"]


def test_a_rate_that_goes_by_the_loss_gets_it_and_one_that_asks_for_more_is_refused() -> None:
    class ByMetric:
        def step(self, metric: float) -> None:
            raise AssertionError(metric)

        get_lr = step

    def plateau() -> Any:
        return paddle.optimizer.lr.ReduceOnPlateau(0.5, patience=0, factor=0.5, threshold=0.3)

    rate, expected = plateau(), plateau()
    with model_in_job(2) as model:
        optimizer = sgd(model, rate)
        rates = []
        for seed in range(5):
            expected.step(model.train_batch(batch(seed=seed), optimizer, rate))
            assert rate() == expected()
            rates.append(rate())
        assert len(set(rates)) > 2
        before = bits(model.layers.state_dict())
        for scheduler, options in (
            (ByMetric(), {}),
            (rate, {"return_micro_batch_loss": True}),
        ):
            with pytest.raises(ConfigError, match=r"calls lr_scheduler\.step\(\) without argum"):
                model.train_batch(batch(), optimizer, scheduler, **options)
        assert bits(model.layers.state_dict()) == before


def test_what_stands_in_the_place_of_another_argument_is_refused_before_training() -> None:
    with model_in_job(2) as model:
        optimizer, before = sgd(model), bits(model.layers.state_dict())
        for wrong in (0.1, paddle.amp.GradScaler()):
            with pytest.raises(ConfigError, match="lr_scheduler of train_batch is not an LRSch"):
                model.train_batch(batch(), optimizer, wrong)
        rate = paddle.optimizer.lr.StepDecay(0.1, 1)
        for wrong in (1024.0, rate):
            with pytest.raises(ConfigError, match="scaler of train_batch is not a GradScaler"):
                model.train_batch(batch(), optimizer, None, wrong)
        assert bits(model.layers.state_dict()) == before


def test_a_value_that_cannot_cross_is_refused_by_its_place() -> None:
    layers = [LayerDesc(nn.Linear, 6, 6), lambda x: {"set": {1, 2}, "x": x}, nn.Linear(6, 4)]
    refused = pytest.raises(BoundaryError, match="set")
    with model_in_job(2, layers=layers, seg_method=[0, 2]) as model, refused:
        model.train_batch(batch(), sgd(model))


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda output, label: output, "one element(.|\n)*float32"),
        (lambda output, label: 1.0, "one element(.|\n)*float"),
        (lambda output, label: output.sum().astype("float16"), r"astype\(\"float32\"\)"),
    ],
)
def test_a_loss_that_is_no_number_to_add_up_is_refused(loss_fn: Any, got: str) -> None:
    refused = pytest.raises(BoundaryError, match=got)
    with model_in_job(2, loss_fn=loss_fn) as model, refused:
        model.train_batch(batch(), sgd(model))


def test_a_label_that_the_loss_cannot_take_is_shown_with_its_dtype() -> None:
    def picky(output: Any, label: Any) -> Any:
        if label.dtype != paddle.int64:
            raise TypeError("integer labels only")
        return nn.functional.cross_entropy(output, label)

    inputs, labels = batch()
    refused = pytest.raises(BoundaryError, match=r"label Tensor of float32\[2, 1\]")
    with model_in_job(2, loss_fn=picky) as model, refused:
        model.train_batch([inputs, labels.astype("float32")], sgd(model))


def test_a_model_without_a_loss_function_cannot_train_but_evaluates() -> None:
    with model_in_job(2, loss_fn=None) as model:
        with pytest.raises(ConfigError, match="loss_fn="):
            model.train_batch(batch(), sgd(model))
        assert len(model.eval_batch([batch()[0], None])) == 4


MICRO_BATCHES = 4

#: Seq1F1B needs layers that take slices: tests/contrib/slices.
SCHEDULES = [name for name in names() if name != "Seq1F1B"]


def check(
    model: Model, ranks: int, schedule: str, micro_batches: int = MICRO_BATCHES, **options: Any
) -> Any:
    """Trains two steps beside the single model, the second with parameters that have moved.

    Returns the schedule.
    """
    with job(ranks, micro_batches, schedule):
        pipe = pipeline(model.layers(), loss_fn=model.loss, **options)
        session = parity.begin(pipe, adam(pipe))
        for step in range(2):
            session.step(model.batch(micro_batches, step))
        assert session.report.passed, session.report.verdict()
        assert tuple(pipe.peak_held.values()) == pipe.schedule.simulate().peak_activations
        assert pipe._runtime.stage._saved == {}
        assert pipe._runtime.stage.split._tapes == {}
        return pipe.schedule


# Each schedule with each model, of two ranks, is compared below; of four ranks in test_late.py.
@pytest.mark.once
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 1), ("gpt", 2), ("convolutions", 3)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_pipeline_has_the_bits_of_the_single_model(
    model: str, schedule: str, ranks: int
) -> None:
    check(MODELS[model], ranks, schedule)


@pytest.mark.once
@pytest.mark.parametrize("micro_batches", [1, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_will_do(schedule: str, micro_batches: int) -> None:
    check(MODELS["mlp"], 2, schedule, micro_batches)


@pytest.mark.once
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B", "Interleaved1F1B", "ZBH1"])
@pytest.mark.parametrize(("ranks", "chunks"), [(1, 3), (2, 4), (3, 3)])
def test_loops_take_any_number_of_chunks(schedule: str, ranks: int, chunks: int) -> None:
    made = check(MODELS["gpt"], ranks, schedule, num_virtual_pipeline_stages=chunks)
    assert made.placement.stages == ranks * chunks


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
