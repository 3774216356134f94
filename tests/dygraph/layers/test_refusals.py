"""What a layer, a model and a wrapper refuse, and say of it; where layers may write in place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from fleetpipe import fleet, parity
from fleetpipe.errors import BoundaryError, ConfigError, StateError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import batch, job, mlp_and_sgd, mlp_layers, model_in_job, pipeline, sgd, train


def linear(taken: int = 6, given: int = 6) -> nn.Layer:
    return nn.Linear(taken, given)


def twice(x: Any) -> Any:
    return x, x


class Sum(nn.Layer):
    """Takes two arguments, which no layer of a pipeline does."""

    def forward(self, x: Any, y: Any) -> Any:
        return x + y


def sum_of_three(args: Any) -> Any:
    x, y, z = args
    return x + y + z


def doubled(x: Any) -> Any:
    return x.scale(2.0)


class Added(nn.Layer):
    """Adds a parameter of another size, with an operator that has no Python frame of Paddle's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([5])

    def forward(self, x: Any) -> Any:
        return x + self.weight


class Block(nn.Layer):
    """Two layers that do not fit each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Linear(5, 6))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def refusal(layers: list[Any], schedule: str = "1F1B", **options: Any) -> str:
    """Returns what training two stages of three layers each is refused with."""
    refused = pytest.raises(BoundaryError)
    with model_in_job(2, schedule=schedule, layers=layers, **options) as model, refused as caught:
        model.train_batch(batch(), sgd(model))
    return str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1F1B", {}), ("ZBH1", {}), ("FThenB", {"recompute_interval": 2, "recompute_ctx": {}})],
)
def test_a_wrong_shape_within_a_stage_names_the_layer_and_the_place(
    schedule: str, options: dict[str, Any]
) -> None:
    layers = [linear(), nn.functional.tanh, linear(), linear(), nn.Tanh(), linear(7)]
    assert re.fullmatch(
        r"layer 5 \(Linear\) cannot take what layer 4 returned\n"
        r"  where: rank 1, operation F1\.0 \(stage 1, micro-batch 0\)\n"
        r"  expected: what Linear\(in_features=7, out_features=6, dtype=\w+\) takes\n"
        r"  got: Tensor of float32\[2, 6\], from layer 4 \(Tanh\)\n"
        r"  likely cause: ValueError: .*\b7\b.*\n"
        r"  what to do: change layer 4 or 5 so that they fit",
        refusal(layers, schedule, **options),
    )


def test_a_layer_that_the_device_has_no_kernel_for_is_no_matter_of_a_border() -> None:
    told = refusal([linear(), nn.SyncBatchNorm(6), *(linear() for _ in range(4))])
    assert "layer 1 (SyncBatchNorm) cannot run on this device, a cpu" in told
    assert "BatchNorm1D" in told


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(
    ("giver", "taker", "advice"),
    [
        (twice, nn.Linear(6, 6), "have layer {} return one Tensor"),
        (twice, nn.functional.relu, "have layer {} return one Tensor"),
        (twice, doubled, "have layer {} return one Tensor"),
        (twice, Sum(), "here a tuple: write forward(self, args)"),
        (nn.Linear(6, 6), Sum(), "have layer {} return a tuple"),
        (nn.Linear(6, 6), sum_of_three, "have layer {} return a tuple"),
        (nn.Linear(6, 6), Added(), "change layer {}"),
    ],
)
def test_a_value_of_another_form_names_the_layer_wherever_it_is(
    giver: Any, taker: Any, advice: str, number: int
) -> None:
    operation = isinstance(taker, nn.Linear) or taker is nn.functional.relu
    if giver is twice and operation and paddle.__version__ < "3":
        pytest.skip("of a tuple Paddle 2.6.2's operations take the first and say nothing")
    layers: list[Any] = [linear() for _ in range(6)]
    layers[number - 1 : number + 1] = [giver, taker]
    message = refusal(layers)
    assert message.startswith(f"layer {number} (")
    assert f") cannot take what layer {number - 1} returned\n" in message
    stage = number // 3
    assert f"where: rank {stage}, operation F{stage}.0 (stage {stage}, micro-batch 0)" in message
    assert advice.format(number - 1) in message


def test_inputs_that_the_first_layer_cannot_take() -> None:
    message = refusal([linear(7), linear()])
    assert "layer 0 (Linear) cannot take the inputs of the batch" in message
    assert "where: rank 0, operation F0.0 (stage 0, micro-batch 0)" in message
    assert "got: Tensor of float32[2, 6]\n" in message


def test_the_loss_says_which_micro_batch_it_could_not_take() -> None:
    def sometimes(output: Any, label: Any) -> Any:
        sometimes.calls += 1  # type: ignore[attr-defined]
        return nn.functional.cross_entropy(output, label[:1] if sometimes.calls == 3 else label)  # type: ignore[attr-defined]

    sometimes.calls = 0  # type: ignore[attr-defined]
    message = refusal([linear(), linear()], loss_fn=sometimes)
    assert "rank 1, operation F1.2 (stage 1, micro-batch 2), last finished B1.1: last" in message


def test_a_wrong_shape_inside_a_layer_names_the_part_and_what_it_was_given() -> None:
    layers = [linear(), linear(), linear(), Block()]
    assert re.fullmatch(
        r"layer 3 \(Block\): its inner\.1 cannot take what the layer gives it\n"
        r"  where: rank 1, operation F1\.0 \(stage 1, micro-batch 0\)[^\n]*\n"
        r"  expected: what Linear\(in_features=5, out_features=6, .*\) takes\n"
        r"  got: Tensor of float32\[2, 8\]; the layer itself was given "
        r"Tensor of float32\[2, 6\], from layer 2 \(Linear\)\n"
        r"  likely cause: ValueError.*\n"
        r"  what to do: change inner\.1 of layer 3, .*",
        refusal(layers),
        re.DOTALL,
    )


def test_a_direct_call_names_the_layer_too() -> None:
    with job(2):
        model = PipelineLayer([linear(), linear(7)], num_stages=2)
        with pytest.raises(BoundaryError, match=r"layer 1 \(Linear\) cannot take what layer 0"):
            model(batch()[0])


def test_an_error_of_the_layers_own_stays_what_it_is() -> None:
    def own(_x: Any) -> Any:
        raise ValueError("a number of my own")

    refused = pytest.raises(ValueError, match="a number of my own")
    with model_in_job(2, layers=[linear(), own]) as model, refused as caught:
        model.train_batch(batch(), sgd(model))
    assert not isinstance(caught.value, BoundaryError)


def test_what_fails_within_paddle_for_another_reason_is_no_refusal() -> None:
    # As a collective of Paddle's raises what Gloo says: in a file of Paddle's.
    file = Path(paddle.__file__).with_name("collective.py")
    late = compile("raise RuntimeError('[gloo/transport/tcp] Timed out')", file, "exec")

    def waits(_x: Any) -> Any:
        exec(late)

    refused = pytest.raises(RuntimeError, match="Timed out")
    with model_in_job(2, layers=[linear(), waits]) as model, refused:
        model.train_batch(batch(), sgd(model))


def test_a_dtype_that_an_operation_lacks_is_a_refusal() -> None:
    message = refusal([linear(), lambda x: x.astype("int32"), nn.functional.gelu, linear()])
    assert re.match(r"layer 2 \(_?gelu\) cannot take what layer 1 returned", message)
    assert "got: Tensor of int32[2, 6], from layer 1" in message


def test_a_list_without_layers_is_refused() -> None:
    for layers in ([], (), iter(())):
        with pytest.raises(ConfigError, match=r"list of layers .* is empty"):
            PipelineLayer(layers, num_stages=1)


@pytest.mark.parametrize("method", ["train_batch", "eval_batch", "predict_batch"])
def test_a_model_that_is_not_wrapped_says_how_to_wrap_it(method: str) -> None:
    with job(2):
        model = PipelineLayer(mlp_layers(), num_stages=2)
        assert not hasattr(model, method)
        with pytest.raises(UsageError, match=rf"{method}(.|\n)*= fleet\.distributed_model\(model"):
            getattr(model, method)(batch())
        with pytest.raises(AttributeError, match="no_such_name"):
            model.no_such_name  # noqa: B018


@pytest.mark.parametrize("again", [False, True], ids=["no job", "another job"])
def test_a_batch_after_the_job_ended_is_refused(again: bool) -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        model.train_batch(batch(), optimizer)
    inputs, _ = data = batch()
    if again:
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    try:
        for call in (
            lambda: model.train_batch(data, optimizer),
            lambda: model.forward_backward_pipeline(data),
            lambda: model.eval_batch(data),
            lambda: model.predict_batch(inputs),
            lambda: model.profile(data),
        ):
            with pytest.raises(StateError, match=r"has ended(.|\n)*fleet\.shutdown\(\)"):
                call()
    finally:
        fleet.shutdown()


def test_paddles_model_refuses_a_pipeline_and_takes_all_else() -> None:
    with job(2):
        layers = PipelineLayer(mlp_layers(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
        for network in (layers, fleet.distributed_model(layers)):
            with pytest.raises(UsageError, match=r"fleetpipe\.Model\(network\)"):
                paddle.Model(network)
    paddle.Model(nn.Linear(2, 2))
    paddle.Model(PipelineLayer(mlp_layers(), num_stages=1))


def test_labels_with_a_fraction_are_told_in_the_place_of_a_kernel() -> None:
    with model_in_job(2) as model:
        inputs, labels = batch()
        with pytest.raises(BoundaryError, match=r"`float32`(.|\n)*labels\.astype\('int64'\)"):
            model.train_batch([inputs, labels.astype("float32")], sgd(model))


KEPT: list[Any] = []


class Keeping(nn.Layer):
    """Fills a list of its module, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        KEPT.append((y * y).mean())
        return y


def with_what_is_kept(output: Any, label: Any) -> Any:
    loss = nn.functional.cross_entropy(output, label) + sum(KEPT)
    KEPT.clear()
    return loss


@pytest.mark.parametrize(
    ("compared", "schedule"), [(False, "1F1B"), (True, "1F1B"), (False, "ZBH1"), (False, "ZBV")]
)
def test_tensors_that_go_around_the_stages_are_named(compared: bool, schedule: str) -> None:
    with job(2, micro_batches=2, schedule=schedule):
        layers = [Keeping(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)]
        model = pipeline(layers, loss_fn=with_what_is_kept)
        optimizer = sgd(model)
        session = parity.begin(model, optimizer)
        if compared:
            # What a stage leaves in this list on a rank that does not compute the loss.
            weight = model.parameters()[0]
            KEPT.append((weight * weight).sum())
            KEPT[0].backward()
        with pytest.raises(BoundaryError, match=r"in a list of its module(.|\n)*\(output, kept\)"):
            session.step(batch(2)) if compared else model.train_batch(batch(2), optimizer)
        assert paddle.is_grad_enabled()
    KEPT.clear()


class Inner(nn.Layer):
    """Has Paddle recompute a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return recompute(self.linear, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_hooks_of_saved_tensors_within_a_recomputed_piece_are_named(schedule: str) -> None:
    layers = [nn.Linear(6, 6), Inner(), Inner(), nn.Linear(6, 4)]
    options = {"recompute_interval": 1, "recompute_ctx": {"mp_group": None}}
    told = pytest.raises(BoundaryError, match=r"Inner(.|\n)*recompute_interval=0")
    with model_in_job(2, 2, schedule, layers=layers, **options) as model, told:
        model.train_batch(batch(2), sgd(model))


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("begin", [1, 2])
def test_a_layer_may_write_into_its_input(begin: int, schedule: str, interval: int) -> None:
    steps = 0

    def late(x: Any) -> Any:
        return nn.functional.relu_(x) if steps >= begin else x

    def found(pp: int, schedule: str = "1F1B", **options: Any) -> Any:
        nonlocal steps
        steps = 0

        def each_step(_model: Any) -> None:
            nonlocal steps
            steps += 1

        linear = [LayerDesc(nn.Linear, *size) for size in ((6, 8), (8, 8), (8, 4))]
        layers = [layer for pair in zip([late] * 3, linear) for layer in pair]
        return train(layers, pp, schedule, steps=3, each_step=each_step, gradients=True, **options)

    options = {"recompute_interval": interval, "recompute_ctx": {}} if interval else {}
    assert found(3, schedule, seg_method=[0, 2, 4], **options) == found(1)


def write_into_labels(output: Any, label: Any) -> Any:
    loss = nn.functional.cross_entropy(output, label)
    label.set_value(label * 0)
    return loss


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_users_data_stay_as_they_are(micro_batches: int) -> None:
    layers = [nn.functional.relu_, LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 8, 4)]
    data = batch(micro_batches)
    before = [tensor.clone() for tensor in data]
    with model_in_job(2, micro_batches, "ZBH1", layers=layers, loss_fn=write_into_labels) as model:
        model.train_batch(data, sgd(model))
        model.eval_batch(data, compute_loss=True)
    for tensor, same in zip(data, before):
        assert tensor.numpy().tobytes() == same.numpy().tobytes()


class Counting(nn.Linear):
    """Hands its number of calls on, which it counts in place."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.calls.add_(paddle.ones([1]))
        return super().forward(x), self.calls


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
def test_a_buffer_that_is_handed_on_may_change_afterwards(schedule: str) -> None:
    layers = [LayerDesc(Counting, 6, 8), lambda x: x[0] * x[1], LayerDesc(nn.Linear, 8, 4)]
    found = train(layers, 2, schedule, seg_method=[0, 1], gradients=True)
    assert found == train(layers, 1, gradients=True)
