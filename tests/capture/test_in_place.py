"""Parameters and buffers into which a forward writes: the bits of the plain model, or a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError
from tests.capture.models import require_bits
from tests.pipelines import accumulate, job

pytestmark = pytest.mark.every_row

X = paddle.to_tensor(np.random.default_rng(0).standard_normal((8, 3)).astype("float32"))
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)

Code = Callable[[Any, Any], Any]


class Net(nn.Layer):  # type: ignore[misc]
    """Layers with code of the user's between them, and what that code writes into."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.first, self.fc, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.teacher = nn.Linear(3, 3)
        for parameter in self.teacher.parameters():
            parameter.stop_gradient = True
        self.register_buffer("mean", paddle.full([3], 0.5))
        self.register_buffer("steps", paddle.zeros([], "int64"))
        self.scale = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))
        self.code = code

    def forward(self, x: Any) -> Any:
        return self.last(self.code(self, self.first(x)).tanh())


class Within(nn.Layer):  # type: ignore[misc]
    """A layer of the user's without sublayers, which writes into what it has."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.register_buffer("mean", paddle.full([3], 0.5))
        self.scale = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))
        self.code = code

    def forward(self, x: Any) -> Any:
        return self.code(self, x)


def moved(self: Any, x: Any) -> Any:
    """Returns what the mean becomes."""
    return (0.9 * self.mean + 0.1 * x.mean(0)).detach()


def by_set_value(self: Any, x: Any) -> Any:
    self.mean.set_value(moved(self, x))
    return x * (1 + self.mean)


def after_its_use(self: Any, x: Any) -> Any:
    y = x * (1 + self.mean)
    self.mean.set_value(moved(self, x))
    return y


def as_an_attribute(self: Any, x: Any) -> Any:
    y = x * self.mean
    self.mean = moved(self, x)
    return y + self.mean


def counted(self: Any, x: Any) -> Any:
    self.steps += 1
    return x / self.steps.astype("float32")


def by_assign(self: Any, x: Any) -> Any:
    paddle.assign(moved(self, x), self.mean)
    return x * (1 + self.mean)


def by_copy(self: Any, x: Any) -> Any:
    self.mean.copy_(moved(self, x), True)
    return x * (1 + self.mean)


def in_place(self: Any, x: Any) -> Any:
    with paddle.no_grad():
        self.mean.scale_(0.9).add_(0.1 * x.mean(0))
        self.mean[0] = 0.25
    return x * (1 + self.mean)


def filled(self: Any, x: Any) -> Any:
    self.mean.fill_(0.75)
    return x * self.mean


def its_data(self: Any, x: Any) -> Any:
    self.mean.data = moved(self, x)
    return x * (1 + self.mean)


def through_a_view(self: Any, x: Any) -> Any:
    self.mean.detach().add_(paddle.full([3], 0.125))
    return x * (1 + self.mean)


def clipped(self: Any, x: Any) -> Any:
    self.fc.weight.set_value(self.fc.weight.clip(-0.5, 0.5))
    return self.fc(x)


def decayed(self: Any, x: Any) -> Any:
    with paddle.no_grad():
        self.scale.scale_(0.95)
    y = self.fc(x) * self.scale
    self.fc.weight.set_value(self.fc.weight * 0.95)
    return y


def assigned(self: Any, x: Any) -> Any:
    paddle.assign((self.fc.weight * 0.95).detach(), self.fc.weight)
    return self.fc(x)


def its_data_in_place(self: Any, x: Any) -> Any:
    with paddle.no_grad():
        self.fc.weight.data.clip_(-0.25, 0.25)
    return self.fc(x)


def taught(self: Any, x: Any) -> Any:
    with paddle.no_grad():
        for parameter, slow in zip(self.fc.parameters(), self.teacher.parameters()):
            slow.set_value(slow * 0.9 + parameter * 0.1)
        wanted = self.teacher(x)
    return self.fc(x) + wanted


def loaded(self: Any, x: Any) -> Any:
    self.teacher.set_state_dict(self.fc.state_dict())
    return self.fc(x) + self.teacher(x)


WRITES = [
    *(by_set_value, after_its_use, as_an_attribute, counted, by_assign, by_copy, in_place, filled),
    *(its_data, through_a_view, clipped, decayed, assigned, its_data_in_place, taught, loaded),
]


@pytest.mark.parametrize("code", WRITES)
def test_what_is_written_has_the_bits_of_the_plain_model(code: Code) -> None:
    """Each micro-batch finds what the one before has left, and backward what was there then."""
    require_bits(lambda: Net(code), [X, LABELS], ["last"])


@pytest.mark.once
@pytest.mark.parametrize("code", [after_its_use, as_an_attribute, in_place, decayed, taught])
def test_a_split_backward_finds_what_was_there(code: Code) -> None:
    require_bits(lambda: Net(code), [X, LABELS], ["last"], "ZBH1")


def decays_its_own(self: Any, x: Any) -> Any:
    self.scale.set_value(self.scale * 0.95)
    return x * self.scale


@pytest.mark.parametrize("code", [after_its_use, as_an_attribute, decays_its_own])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_layer_of_the_users_may_write_into_what_it_has(code: Code, schedule: str) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(3, 3), Within(code), nn.Linear(3, 3))

    require_bits(build, [X, LABELS], ["2"], schedule)


class Apart(Net):
    """Writes into the mean at its beginning, and reads it at its end."""

    def forward(self, x: Any) -> Any:
        self.mean.set_value(x.mean(0))
        return self.last(self.fc(self.first(x))) * self.mean


class InEvaluation(Net):
    """Writes in training, and in evaluation reads it elsewhere."""

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean.set_value(x.mean(0))
        x = self.last(self.fc(self.first(x)))
        return x if self.training else x * self.mean


@pytest.mark.parametrize("kind", [Apart, InEvaluation])
def test_no_cut_parts_a_write_and_a_read(kind: type) -> None:
    found = fleetpipe.explain(kind(by_copy), X[:2])
    assert not found.places
    assert "'mean' is used on both sides, and the forward writes into it" in str(found)
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(kind(by_copy), X[:2], split_spec=["last"], verify=False)
    text, line = str(caught.value), kind.forward.__code__.co_firstlineno
    assert "two stages share 'mean', into which the forward writes" in text
    assert f"in stage 0, {__file__}:{line + 1 if kind is Apart else line + 2}" in text


def reads_a_counter(self: Any, x: Any) -> Any:
    self.steps += 1
    return x * 2 if int(self.steps) > 1 else x


def reads_then_counts(self: Any, x: Any) -> Any:
    factor = int(self.steps)
    self.steps += 1
    return x * factor


def takes_the_memory(self: Any, x: Any) -> Any:
    self.mean.get_tensor().set(np.ones(3, "float32"), paddle.CPUPlace())
    return x + self.mean


def shares_a_buffer(self: Any, x: Any) -> Any:
    moved(self, x)._share_buffer_to(self.mean)
    return x + self.mean


def grows(self: Any, x: Any) -> Any:
    self.mean = paddle.concat([self.mean, self.mean])
    return x


def is_two(self: Any, x: Any) -> Any:
    self.mean = self.scale
    return x


def is_none(self: Any, x: Any) -> Any:
    self.mean = None
    return x


def has_a_graph(self: Any, x: Any) -> Any:
    paddle.assign(x.mean(0), self.scale)
    return x * self.scale


OUTSIDE = paddle.zeros([3])


def writes_elsewhere(self: Any, x: Any) -> Any:
    OUTSIDE.add_(paddle.full([3], 0.5))
    return x + OUTSIDE


def adds_with_gradients(self: Any, x: Any) -> Any:
    self.scale.add_(paddle.full([3], 0.5))
    return x * self.scale


#: The code, the lines below its first at which the user finds it, and what the message says.
REFUSED: list[tuple[Code, int, str, str]] = [
    (reads_a_counter, 2, "reads the numbers in a tensor", "put that code into a sublayer"),
    (reads_then_counts, 1, "numbers in 'steps', which changes", "by operations of Paddle's"),
    (lambda self, x: x * float(self.scale.numpy()[0]), 0, "numbers in 'scale'", "by operations"),
    (takes_the_memory, 1, "reaches for the memory of a tensor", "set_value or paddle.assign"),
    (shares_a_buffer, 1, "reaches for the memory of a tensor", "set_value or paddle.assign"),
    (grows, 1, "gives 'mean' another shape", "keep one shape and dtype"),
    (is_two, 1, "be the same tensor as 'scale'", "assign a copy"),
    (is_none, 1, "takes the buffer 'mean' away", "paddle.assign"),
    (writes_elsewhere, 1, "into a tensor that came from no operation", "register_buffer"),
    (adds_with_gradients, 1, "in place into the trained parameter 'scale'", "no_grad"),
    (has_a_graph, 1, "writes into the parameter 'scale' what needs a gradient", "no_grad"),
]


@pytest.mark.parametrize(("code", "line", "message", "fix"), REFUSED)
def test_what_cannot_be_repeated_is_refused_with_its_line(
    code: Code, line: int, message: str, fix: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(Net(code), X[:2], split_spec=["last"], verify=False)
    text = str(caught.value)
    assert message in text
    assert f"where: {__file__}:{code.__code__.co_firstlineno + line}\n" in text
    assert fix in text


def test_a_number_that_the_user_changes_is_read_anew() -> None:
    class Scaled(Net):
        def forward(self, x: Any) -> Any:
            return self.last(self.first(x) * self.steps.item())

    with job(2):
        model = Scaled(clipped)
        pipe = fleetpipe.pipeline(model, X[:2], nn.CrossEntropyLoss(), ["last"], verify=False)
        wrapped = fleet.distributed_model(pipe)
        for steps in (2, 0, 3):
            model.steps.set_value(paddle.to_tensor(steps))
            loss = wrapped.forward_backward_pipeline([X, LABELS])
            parts = zip(X.split(4), LABELS.split(4))
            expected = accumulate(nn.functional.cross_entropy(model(x), y) / 4 for x, y in parts)
            assert float(loss) == float(expected)


@pytest.mark.parametrize(("code", "name"), [(clipped, "fc.weight"), (as_an_attribute, "mean")])
def test_what_operations_write_into_is_not_computed_again(code: Code, name: str) -> None:
    with job(2), pytest.raises(CaptureError, match=rf"'{name}'(.|\n)*recompute_interval=0"):
        fleetpipe.pipeline(Net(code), X[:2], split_spec=["last"], recompute_interval=2)


def test_a_layer_with_a_buffer_is_computed_again_from_what_it_was() -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(3, 3), Within(as_an_attribute), nn.Linear(3, 3))

    require_bits(build, [X, LABELS], ["2"], recompute_interval=2)
