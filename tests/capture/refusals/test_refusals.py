"""What a user reads where a model cannot be captured: file, line, and what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError, ConfigError, UsageError
from tests.capture.models import require_bits
from tests.pipelines import job, sgd

pytestmark = pytest.mark.every_row

X = paddle.to_tensor(np.arange(24, dtype="float32").reshape([8, 3]) / 10)
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)


class Double(paddle.autograd.PyLayer):  # type: ignore[misc]
    """An operation of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


def branch(x: Any) -> Any:
    return x * 2 if x.sum() > 1 else x


def own_operation(x: Any) -> Any:
    return Double.apply(x)


def constant(x: Any) -> Any:
    return x + paddle.to_tensor([1.0, 2.0, 3.0])


def hooked(x: Any) -> Any:
    y = x * 1.0
    if not y.stop_gradient:
        y.register_hook(lambda grad: grad * 3)
    return y


def masked(x: Any) -> Any:
    # Never empty, of which 2.6.2 makes no sum.
    mask = x >= x.mean()
    return x + paddle.masked_select(x, mask).sum() + x[mask].mean()


def unique(x: Any) -> Any:
    return x + paddle.unique((x > 0).astype("int32")).astype("float32").sum()


class Model(nn.Layer):  # type: ignore[misc]
    """Code between two layers: in the model's own forward, or in that of a sublayer."""

    def __init__(self, code: Callable[[Any], Any], inside: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.middle = Middle(code) if inside else code

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Layer):  # type: ignore[misc]
    """A sublayer with a sublayer, and that code."""

    def __init__(self, code: Callable[[Any], Any]) -> None:
        super().__init__()
        self.code, self.linear = code, nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.code(self.linear(x))


@pytest.mark.parametrize("code", [own_operation, constant, hooked, masked, unique])
def test_glue_is_what_operations_of_paddles_are(code: Callable[[Any], Any]) -> None:
    for inside in (True, False):
        require_bits(lambda: Model(code, inside), [X, LABELS], ["last"], verify=inside)  # noqa: B023


def test_a_layer_that_is_not_opened_says_why() -> None:
    model = Model(branch, True)
    text = str(fleetpipe.explain(model, X[:2]))
    line = branch.__code__.co_firstlineno + 1
    assert f"test_refusals.py:{line}" in text
    assert "not opened: middle: its forward reads the numbers in a tensor" in text
    with pytest.raises(ConfigError, match=r"cuts before middle.linear, where(.|\n)*not opened"):
        fleetpipe.pipeline(model, X[:2], split_spec=["middle.linear"])


def test_a_stage_without_parameters_trains() -> None:
    class Plain(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.last(self.act(self.first(x)) * 2)

    require_bits(Plain, [X, LABELS], ["act", "last"])


def test_frozen_layers_and_what_no_node_uses() -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        for parameter in model[0].parameters():
            parameter.stop_gradient = True
        model[1].unused = nn.Linear(2, 2)
        return model

    require_bits(build, [X, LABELS], ["1", "2"], verify=True)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"tensors and plain values(.|\n)*ndarray"):
        fleetpipe.pipeline(Model(constant, False), X.numpy(), split_spec=["last"])


SIGNED = paddle.to_tensor(np.arange(24, dtype="float32").reshape([8, 3]) / 10 - 1)
NUMBERS = random.Random(0)


class Net(nn.Layer):  # type: ignore[misc]
    """Three layers, and code of the user's before the last, in the model's own forward."""

    def __init__(self, code: Callable[[Any, Any], Any], sublayers: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.code = Within(code) if sublayers else code
        self.calls, self.seen = 0, []  # type: ignore[var-annotated]
        self.counts, self.keeps = Counts(), Keeps()

    def forward(self, x: Any) -> Any:
        x = self.second(self.first(x).tanh())
        return self.last(self.code(x) if isinstance(self.code, Within) else self.code(self, x))


class Within(nn.Layer):  # type: ignore[misc]
    """The same code in a sublayer."""

    def __init__(self, code: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.second, self.calls, self.code = nn.Linear(3, 3), 0, code

    def forward(self, x: Any) -> Any:
        return self.code(self, self.second(x))


class Keeps(nn.Layer):  # type: ignore[misc]
    """Has a tensor beside what it returns."""

    def forward(self, x: Any) -> Any:
        self.most = x.max()
        return x.tanh()


class Counts(nn.Layer):  # type: ignore[misc]
    """Makes a number of Python's of a tensor."""

    def forward(self, x: Any) -> Any:
        return bool(x.sum() > 0)


def branches(self: Any, x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x


def loops(self: Any, x: Any) -> Any:
    while x.abs().max() < 10:
        x = x * 2
    return x


def takes_an_array(self: Any, x: Any) -> Any:
    return x + paddle.to_tensor(np.tanh(x.detach().numpy()))


def conditional(self: Any, x: Any) -> Any:
    return paddle.static.nn.cond(x.sum() > 0, lambda: self.second(x), lambda: x)


def counts_what_a_mask_left(self: Any, x: Any) -> Any:
    return x / (1 + len(paddle.nonzero(x > 0)))


def some_rows(x: Any) -> Any:
    """Selects the first row, and those that begin with what is positive."""
    return x[(x[:, 0] > 0) | (paddle.arange(x.shape[0]) == 0)]


def branches_on_what_a_mask_left(self: Any, x: Any) -> Any:
    found = paddle.nonzero(x > 1)
    return x * 2 if found.shape[0] else x


def counts_what_came_of_a_mask(self: Any, x: Any) -> Any:
    rows = self.second(some_rows(x)).tanh().unsqueeze(1)
    count, _, width = rows.shape
    return x * width * count


def passes_on_a_size(self: Any, x: Any) -> Any:
    rows = some_rows(x)
    return x + (rows + paddle.ones(rows.shape)).sum(0)


def branches_on_chance(self: Any, x: Any) -> Any:
    chance = random.random()
    if chance < 0.5:
        return x * 2
    return x


def branches_on_chance_of_numpy(self: Any, x: Any) -> Any:
    kept = np.random.uniform() < 0.5
    return x * 2 if kept else x


def branches_on_chance_of_its_own(self: Any, x: Any) -> Any:
    heads = [NUMBERS.random() for _ in range(3)]
    return x * 2 if heads[0] < 0.5 else x


def counts_its_calls(self: Any, x: Any) -> Any:
    self.calls += 1
    return x / self.calls


def keeps_a_tensor(self: Any, x: Any) -> Any:
    self.before = x.detach()
    return x + self.before


def computes_gradients(self: Any, x: Any) -> Any:
    y = x.detach()
    y.stop_gradient = False
    with paddle.enable_grad():
        return x + paddle.grad((y * y).sum(), y)[0]


READS = "the forward of Net reads the numbers in a tensor"
SIZE = "the forward of Net reads a size that depends on the numbers in a tensor"
DRAWS = "the forward of Net draws from a generator of Python's or NumPy's"
OTHERWISE = "the forward of Net calls something else when it runs again on other numbers"
NUMBER = "a number of Python's that counts makes"
KEPT = "uses a tensor that keeps keeps as 'most'"
STRANGE = "that came from no operation of Paddle's"
WITHIN = "put that code into a sublayer: what is within one may do anything"
PYTHONS = "operations of Paddle's; or put that code into a sublayer"

#: The code, the lines below its first at which the user finds it, and what the message says.
REFUSED: list[tuple[Callable[[Any, Any], Any], int, str, str]] = [
    (branches, 1, READS, WITHIN),
    (loops, 1, READS, WITHIN),
    (lambda self, x: x * x.mean().item(), 0, READS, WITHIN),
    (takes_an_array, 1, READS, WITHIN),
    (lambda self, x: x * x.mean(0).tolist()[0], 0, READS, WITHIN),
    (lambda self, x: x * (int(x.abs().max() * 0) + 2), 0, READS, WITHIN),
    (conditional, 1, READS, WITHIN),
    (counts_what_a_mask_left, 1, SIZE, "paddle.numel(x)"),
    (branches_on_what_a_mask_left, 2, SIZE, WITHIN),
    (counts_what_came_of_a_mask, 3, SIZE, WITHIN),
    (lambda self, x: x / (paddle.masked_select(x, x > 0).size + 1), 0, SIZE, WITHIN),
    (passes_on_a_size, 2, SIZE, WITHIN),
    (lambda self, x: x + sum(row.sum() for row in some_rows(x)), 0, SIZE, WITHIN),
    (lambda self, x: x * 2 if self.counts(x) else x, 0, NUMBER, "return a tensor"),
    (lambda self, x: x * NUMBERS.random(), 0, DRAWS, "draw by paddle.rand"),
    (branches_on_chance, 1, DRAWS, "draw by paddle.rand"),
    (branches_on_chance_of_numpy, 1, DRAWS, "draw by paddle.rand"),
    (branches_on_chance_of_its_own, 1, DRAWS, "draw by paddle.rand"),
    (lambda self, x: x * float(np.random.default_rng().random()), 0, OTHERWISE, PYTHONS),
    (counts_its_calls, 2, OTHERWISE, PYTHONS),
    (keeps_a_tensor, 1, "the forward of Net keeps a tensor as 'before'", "paddle.assign"),
    (computes_gradients, 4, "the forward of Net computes gradients", WITHIN),
    (lambda self, x: self.keeps(x) * self.keeps.most, 0, KEPT, "return it from keeps too"),
    (lambda self, x: nn.Linear(3, 3)(x), 0, STRANGE, "parameters in __init__"),
]


@pytest.mark.parametrize(("code", "line", "message", "fix"), REFUSED)
def test_the_line_is_named_and_what_to_do(
    code: Callable[[Any, Any], Any], line: int, message: str, fix: str
) -> None:
    paddle.seed(1)
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(Net(code), SIGNED[:2], split_spec=["second"])
    text = str(caught.value)
    assert message in text
    assert f"where: {__file__}:{code.__code__.co_firstlineno + line}\n" in text
    assert fix in text


AS_A_NODE = [
    branches,
    loops,
    takes_an_array,
    conditional,
    passes_on_a_size,
    counts_what_a_mask_left,
]


@pytest.mark.once_for("takes", "counts")
@pytest.mark.parametrize("code", AS_A_NODE)
def test_in_a_sublayer_the_same_code_is_a_node(code: Callable[[Any, Any], Any]) -> None:
    """The proof varies the numbers, on some of which a loop would not end."""
    verify = code in (loops, counts_what_a_mask_left)
    require_bits(lambda: Net(code, True), [SIGNED, LABELS], ["last"], steps=1, verify=verify)


def keeps_a_layer(self: Any, x: Any) -> Any:
    self.made = getattr(self, "made", None) or nn.Linear(3, 3)
    return self.made(x)


def test_a_layer_that_the_first_call_makes_is_there_before() -> None:
    net = Net(keeps_a_layer, True)
    with pytest.raises(CaptureError, match=r"makes the parameter 'code\.made\.weight'"):
        fleetpipe.pipeline(net, SIGNED[:2], split_spec=["last"])
    net(SIGNED[:2])
    fleetpipe.pipeline(net, SIGNED[:2], split_spec=["last"])


def writes_in_place(self: Any, x: Any) -> Any:
    y = x + 0.0
    y.add_(x)
    y[:, 0] = 2.0
    return y.scale_(0.5)


class Recomputes(nn.Layer):  # type: ignore[misc]
    """Blocks that are computed again in backward, as language models do to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.LayerList([Within(writes_in_place) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = recompute(block, x) if self.training else block(x)
        return x


def test_a_model_that_recomputes_its_blocks_is_cut_between_them() -> None:
    spec = ["blocks.1", "blocks.3"]
    require_bits(Recomputes, [SIGNED, LABELS], spec, recompute_interval=2, verify=True)


class Compiled(nn.Layer):  # type: ignore[misc]
    """A part of it is compiled at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = paddle.jit.to_static(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


def test_what_to_static_compiles_is_a_node() -> None:
    model, x = Compiled(), paddle.randn([4, 8])
    found = fleetpipe.explain(model, x)
    assert [node.name for node in found.trace.nodes] == ["first", "middle", "last"]
    assert "compiled by to_static" in found.unopened["middle"]
    with job(2, 2):
        pipe = fleetpipe.pipeline(Compiled(), x[:2], loss_fn=lambda out, _: out.mean())
        outputs = fleet.distributed_model(pipe).predict_batch((x,))
        pipe.plain.eval()
        plain = [pipe.plain(x[:2]), pipe.plain(x[2:])]
        assert paddle.equal_all(outputs, paddle.concat(plain))


def test_an_input_that_the_forward_writes_into_is_the_stages_own() -> None:
    class Writes(Net):
        def forward(self, x: Any) -> Any:
            return super().forward(x.add_(paddle.ones([3])))

    given = SIGNED[:2].clone()
    pipe = fleetpipe.pipeline(Writes(writes_in_place), given, split_spec=["second"])
    assert str(pipe.proof).startswith("equal in bits")
    assert np.array_equal(given, SIGNED[:2])


def test_what_python_does_beside_operations_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def aside(self: Any, x: Any) -> Any:
        self.seen.append(x)
        self.calls = 7
        return recompute(self.second, x)

    fleetpipe.pipeline(Net(aside), SIGNED[:2], split_spec=["second"])
    told, line = caplog.text, aside.__code__.co_firstlineno
    assert f"leave out what the forward does: it changes 'seen', {__file__}:" in told
    assert f"it sets 'calls', {__file__}:{line + 2}" in told
    assert f"it recomputes, {__file__}:{line + 3}; pass recompute_interval" in told


def test_a_forward_that_fails_says_where_and_on_what() -> None:
    def for_two_rows(self: Any, x: Any) -> Any:
        return x.reshape([2, 3])

    line = for_two_rows.__code__.co_firstlineno + 1
    with job(2):
        pipe = fleetpipe.pipeline(Net(for_two_rows), SIGNED[:2], split_spec=["second"])
        model = fleet.distributed_model(pipe)
        # The last micro-batch has one row.
        with pytest.raises(CaptureError) as caught:
            model.predict_batch(SIGNED[:3])
    text = str(caught.value)
    assert "the forward of Net fails: ValueError" in text
    assert f"{__file__}:{line}" in text
    assert "float32[1, 3]" in text
    with pytest.raises(CaptureError, match=r"float32\[2, 5\](.|\n)*call the plain model"):
        fleetpipe.pipeline(Net(branches), paddle.ones([2, 5]), split_spec=["second"])


class Wrapped:
    """No tensor, but it has one."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("made", [Wrapped, lambda x: None, lambda x: 3.0])
def test_a_model_that_returns_no_tensor_is_refused(made: Callable[[Any], Any]) -> None:
    class Returns(Net):
        def forward(self, x: Any) -> Any:
            return made(self.first(x))

    with pytest.raises(CaptureError, match=r"returns what is no tensor(.|\n)*test_refusals.py:\d+"):
        fleetpipe.pipeline(Returns(branches), SIGNED[:2], split_spec=["first"])


def test_texts_among_the_outputs_come_back_and_numbers_of_one_micro_batch_do_not() -> None:
    class Returns(Net):
        def forward(self, x: Any) -> Any:
            return {"x": super().forward(x), "name": "a", "none": None, "rows": len(x)}

    with job(2):
        pipe = fleetpipe.pipeline(
            Returns(writes_in_place),
            SIGNED[:2],
            lambda out, labels: nn.functional.cross_entropy(out["x"], labels),
            ["second"],
        )
        model = fleet.distributed_model(pipe)
        model.train_batch([SIGNED, LABELS], sgd(model))
        with pytest.raises(UsageError, match="a number in an output is that of one micro-batch"):
            model.predict_batch(SIGNED)
        found = model.predict_batch(SIGNED[:2])
    assert (found["name"], found["none"], found["rows"]) == ("a", None, 2)
    assert found["x"].shape == [2, 3]
