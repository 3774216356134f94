"""The first batches of a captured model are trained beside the untouched one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, log
from fleetpipe.capture.running import captured_state, stages
from fleetpipe.errors import BoundaryError, CaptureError, ConfigError
from fleetpipe.paddle_api.optimizer import learning_rate_of
from fleetpipe.paddle_api.tensor import shares_memory
from tests.fixtures import LogCapture, Patch
from tests.pipelines import job

ROWS = 8


@pytest.fixture(autouse=True)
def _two_stages() -> Iterator[None]:
    with job(2):
        yield


class Gated(nn.Layer):  # type: ignore[misc]
    """Two layers and a buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1D(4)

    def forward(self, x: Any) -> Any:
        return self.second(self.norm(self.first(x)).tanh())


def data(seed: int) -> list[Any]:
    numbers = np.random.default_rng(seed)
    return [paddle.to_tensor(numbers.normal(size=(ROWS, 4)).astype("float32")) for _ in range(2)]


def wrapped(build: Any = Gated, **options: Any) -> tuple[Any, Any, Any]:
    paddle.seed(0)
    options = {"split_spec": ["second"], "loss_fn": nn.MSELoss(), **options}
    pipe = fleetpipe.pipeline(build(), data(0)[0][:2], **options)
    rate = paddle.optimizer.lr.StepDecay(0.1, 1)
    clip = nn.ClipGradByGlobalNorm(0.1)
    adam = paddle.optimizer.AdamW(rate, parameters=pipe.parameters(), grad_clip=clip)
    return pipe, fleet.distributed_model(pipe), fleet.distributed_optimizer(adam)


class OwnLoss(Gated):
    """Has its loss as a method, with a parameter of its own and another's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([4])

    def loss(self, output: Any, label: Any) -> Any:
        return ((output * self.scale + self.first.bias - label) ** 2).mean()


def test_a_loss_that_uses_parameters_of_the_model_trains_without_a_shadow(
    caplog: LogCapture,
) -> None:
    losses = []
    for verify in ("first", False):
        paddle.seed(0)
        model = OwnLoss()
        _, pipe, optimizer = wrapped([model].pop, loss_fn=model.loss, verify=verify)
        losses.append([float(pipe.train_batch(data(step), optimizer)) for step in range(3)])
    assert losses[0] == losses[1]
    assert "the loss uses" in caplog.text


def test_a_loss_that_uses_a_parameter_of_another_rank_is_refused() -> None:
    with paddle.LazyGuard():
        elsewhere = nn.Linear(4, 4)
    _, model, optimizer = wrapped(loss_fn=lambda out, _: elsewhere(out).mean(), verify=False)
    with pytest.raises(BoundaryError, match="uses a parameter that lies on another rank"):
        model.train_batch(data(0), optimizer)


@pytest.mark.parametrize("parts", [False, True], ids=["train_batch", "three parts"])
def test_it_ends_after_two_batches_and_says_what_it_cost(parts: bool, caplog: LogCapture) -> None:
    """And others resume from the optimizer's state, whose names are those of a plain model's."""
    log.once.cache_clear()  # an earlier test may have taken just as long, and said so
    _, model, optimizer = wrapped()
    rate = learning_rate_of(optimizer.wrapped)
    for step in range(3):
        if parts:
            model._prepare_training(data(step), optimizer, rate)
            model.forward_backward_pipeline(data(step))
            model._optimizer_step()
        else:
            model.train_batch(data(step), optimizer, rate)
        said = "the first 2 batches were trained beside the untouched model" in caplog.text
        assert said == (step >= 1)
    names = [name for name in optimizer.state_dict() if "moment" in name]
    assert len(names) == 12
    assert all(name.endswith("_0") for name in names), names


@pytest.mark.parametrize("batch", [0, 1])
def test_a_difference_ends_the_job_before_the_parameters_change(batch: int) -> None:
    pipe, model, optimizer = wrapped()
    plain = Gated.forward.__code__
    calls = [0]
    run = stages.CapturedStages.function

    def function(self: Any, stage: int) -> Any:
        original = run(self, stage)

        def wrong(value: Any, micro_batch: Any) -> Any:
            output = original(value, micro_batch)
            calls[0] += stage == 0
            if stage == 0 and calls[0] > 4 * batch:
                output = {
                    name: one * 0.5 if name != "signature" else one for name, one in output.items()
                }
            return output

        return wrong

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stages.CapturedStages, "function", function)
        for step in range(batch):
            model.train_batch(data(step), optimizer)
        before = {name: p.numpy() for name, p in pipe.state_dict().items() if "norm" not in name}
        with pytest.raises(CaptureError) as caught:
            model.train_batch(data(batch), optimizer)
    text = str(caught.value)
    assert f"batch {batch} does not train as the plain model does" in text
    assert f"{__file__}:{plain.co_firstlineno + 1}" in text
    for name, numbers in before.items():
        assert np.array_equal(pipe.state_dict()[name].numpy(), numbers), name


def test_the_optimizers_update_is_compared(monkeypatch: Patch) -> None:
    pipe, model, optimizer = wrapped()
    kind = type(optimizer.wrapped)
    step = kind.step

    def wrong(self: Any) -> None:
        step(self)
        if self is optimizer.wrapped:
            pipe.plain.first.weight.set_value(pipe.plain.first.weight * 1.01)

    monkeypatch.setattr(kind, "step", wrong)
    before = pipe.plain.first.weight.numpy()
    with pytest.raises(CaptureError, match=r"the update of first\.weight differs"):
        model.train_batch(data(0), optimizer)
    assert np.array_equal(pipe.plain.first.weight.numpy(), before)


@pytest.mark.parametrize("verify", [True, False])
def test_it_is_left_out_where_nobody_asks(verify: bool, caplog: LogCapture) -> None:
    _, model, optimizer = wrapped(verify=verify)
    for step in range(2):
        model.train_batch(data(step), optimizer)
    assert "untouched" not in caplog.text


def test_verify_takes_three_values() -> None:
    with pytest.raises(ConfigError, match="verify is True, False or 'first'"):
        fleetpipe.pipeline(Gated(), data(0)[0], split_spec=["second"], verify="last")


class HookedGradient(Gated):
    """Has a hook on a gradient, which a copy of its parameter lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 0.5)


class Reaching(Gated):
    """Has a hook that reaches into the model, not into its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.features = features = {}
        self.first.register_forward_post_hook(
            lambda layer, inputs, output: features.update(first=output.detach())
        )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (HookedGradient, "a parameter has a hook"),
        (Reaching, "a function of first holds on to what a copy has anew"),
    ],
)
def test_a_copy_that_trains_otherwise_is_no_measure(
    build: Any, words: str, caplog: LogCapture
) -> None:
    _, model, optimizer = wrapped(build)
    for step in range(3):
        model.train_batch(data(step), optimizer)
    assert f"not shadowed by the plain model: {words}" in caplog.text
    assert "trained alike" not in caplog.text


def test_a_model_that_finds_no_room_is_not_called_equal(
    monkeypatch: Patch, caplog: LogCapture
) -> None:
    monkeypatch.setattr(captured_state, "_available_bytes", lambda: 1000)
    test_a_copy_that_trains_otherwise_is_no_measure(Gated, "the model needs about", caplog)


def test_a_step_that_the_user_has_put_on_the_optimizer_is_taken_once() -> None:
    _, model, optimizer = wrapped()
    step, calls = optimizer.wrapped.step, [0]

    def counted() -> None:
        calls[0] += 1
        step()

    optimizer.wrapped.step = counted
    for number in range(2):
        model.train_batch(data(number), optimizer)
    assert calls == [2]


class Remembering(nn.Layer):  # type: ignore[misc]
    """Is a node, whose forward gives it its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])
        self.register_buffer("before", None)

    def forward(self, x: Any) -> Any:
        h = x @ self.weight
        output = h if self.before is None else h + 0.5 * self.before
        self.before = h.detach()
        return output


class Scaled(Gated):
    """Has a buffer of no state dict, and no attribute that a forward sets, as a batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", paddle.ones([4]), persistable=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x * self.scale)


class Buffered(Scaled):
    """Has a buffer without a value, one of no state dict, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Remembering()
        # 2.6.2 has no sum of it.
        self.register_buffer("empty", paddle.zeros([0 if paddle.__version__ >= "3" else 1, 4]))

    def forward(self, x: Any) -> Any:
        return super().forward(self.memory(x)) + self.empty.sum()


class Hooked(Gated):
    """Has hooks on a layer and on a parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_post_hook(lambda layer, inputs, output: output * 2)
        nn.utils.weight_norm(self.second)


def in_evaluation(net: Any, _: Any) -> None:
    net.norm.eval()


def with_another_group(net: Any, optimizer: Any) -> None:
    optimizer._add_param_group({"params": net.second.parameters()})


def with_a_clip(_: Any, optimizer: Any) -> None:
    optimizer._param_groups[0]["grad_clip"] = nn.ClipGradByGlobalNorm(1e-3)


def frozen(net: Any, _: Any) -> None:
    for parameter in net.first.parameters():
        parameter.stop_gradient = True


def scaled(net: Any, _: Any) -> None:
    if isinstance(net, Scaled):
        net.scale.set_value(paddle.full([4], 2.0))


def infinite(net: Any, _: Any) -> None:
    net.second.bias.set_value(paddle.full([4], float("inf")))


@pytest.mark.parametrize(
    ("change", "at", "build"),
    [
        *((in_evaluation, 0, Gated), (with_another_group, 1, Gated), (with_a_clip, 1, Gated)),
        *((infinite, 0, Gated), (infinite, 1, Gated), (frozen, 1, Gated), (scaled, 1, Buffered)),
        *((scaled, 1, Scaled), (scaled, 0, Hooked)),
    ],
)
def test_what_a_script_does_around_the_first_batches_is_no_difference(
    change: Any, at: int, build: Any, caplog: LogCapture
) -> None:
    log.once.cache_clear()  # an earlier test may have taken just as long, and said so
    paddle.seed(0)
    net = build()
    plain = copy.deepcopy(net) if build is not Hooked else build()
    plain.set_state_dict(net.state_dict())
    pipe = fleetpipe.pipeline(net, data(0)[0][:2], nn.MSELoss(), ["second"])
    model = fleet.distributed_model(pipe)

    def over_some(part: Any) -> Any:
        some = [*part.first.parameters(), *part.norm.parameters()]
        return paddle.optimizer.AdamW(0.1, parameters=[{"params": some}])

    right, optimizer = over_some(plain), fleet.distributed_optimizer(over_some(net))
    plain.train()
    for step in range(3):
        if step == at:
            change(net, optimizer.wrapped)
            change(plain, right)
        inputs, labels = data(step)
        for row in range(0, ROWS, 2):
            output = plain(inputs[row : row + 2])
            (nn.functional.mse_loss(output, labels[row : row + 2]) / 4).backward()
        right.step()
        right.clear_grad()
        model.train_batch([inputs, labels], optimizer)
    for name, tensor in plain.state_dict().items():
        assert np.array_equal(pipe.state_dict()[name], tensor, equal_nan=True), name
    assert "trained alike" in caplog.text


def test_a_loss_by_the_input_is_refused_with_its_line() -> None:
    """The plain model fails on it too, whose inputs are copies."""

    def loss(output: Any, label: Any) -> Any:
        return paddle.grad(output.sum(), label, create_graph=True)[0].square().mean()

    _, model, optimizer = wrapped(loss_fn=loss)
    x = data(0)[0]
    x.stop_gradient = False
    with pytest.raises(BoundaryError) as caught:
        model.train_batch([x, x], optimizer)
    line = loss.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(caught.value)
    assert "create_graph=True" in str(caught.value)


class Auxiliary(Gated):
    """Hands a loss on by a list of the module's."""

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        AUXILIARY.append((h**2).mean())
        return self.second(h)


AUXILIARY: list[Any] = []


@pytest.mark.parametrize("verify", ["first", True, False])
def test_what_a_forward_keeps_for_the_loss_is_refused(verify: Any) -> None:
    def loss(output: Any, label: Any) -> Any:
        return nn.functional.mse_loss(output, label) + sum(AUXILIARY)

    AUXILIARY.clear()
    with pytest.raises(CaptureError, match="reads a tensor that the forward of Auxiliary keeps"):
        wrapped(Auxiliary, loss_fn=loss, verify=verify)


def test_a_batch_on_which_the_plain_model_alone_fails_is_refused() -> None:
    def loss(output: Any, label: Any) -> Any:
        # No name in code says what it reads.
        kept = globals()["auxiliary".upper()]
        total = nn.functional.mse_loss(output, label) + sum(kept)
        kept.clear()
        return total

    _, model, optimizer = wrapped(Auxiliary, loss_fn=loss)
    with pytest.raises(CaptureError, match="runs through the stages, and the plain model alone"):
        model.train_batch(data(1), optimizer)


class Counting(nn.Layer):  # type: ignore[misc]
    """A loss with a buffer and a count, which both weigh it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", paddle.zeros([]))
        self.count = [0]

    def forward(self, output: Any, label: Any) -> Any:
        self.calls.add_(paddle.ones([]))
        self.count[0] += 1
        return nn.functional.mse_loss(output, label) * (self.calls + self.count[0])


def test_a_loss_that_counts_is_stepped_once() -> None:
    loss = Counting()
    _, model, optimizer = wrapped(loss_fn=loss)
    for number in range(1, 4):
        model.train_batch(data(number), optimizer)
        assert (float(loss.calls), loss.count[0]) == (4 * number, 4 * number)


def test_a_loss_that_writes_into_a_buffer_of_the_model_is_refused() -> None:
    net = Gated()
    net.register_buffer("center", paddle.zeros([4]))

    def loss(output: Any, label: Any) -> Any:
        net.center.set_value(0.9 * net.center + 0.1 * output.detach().mean(0))
        return nn.functional.mse_loss(output - net.center, label)

    _, model, optimizer = wrapped(lambda: net, loss_fn=loss)
    with pytest.raises(CaptureError, match="a loss function writes into center"):
        model.train_batch(data(0), optimizer)
    assert not net.center.numpy().any()


def test_the_copy_has_the_memory_of_the_stages() -> None:
    pipe, model, optimizer = wrapped()
    model.train_batch(data(0), optimizer)
    copies = model._runtime.engines.observer("companion").members[0]._reference.tensors()
    parameters = pipe.state.own_parameters()
    parameters = {name: p for name, p in parameters.items() if not p.stop_gradient}
    assert [n for n, p in parameters.items() if shares_memory(copies[n], p)] == [*parameters]
