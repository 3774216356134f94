"""Where a model is cut: in every way that a user may say, or by cost; and what is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import SplitPoint
from fleetpipe.capture.cutting.auto import Choice, choose, find_cut_points
from fleetpipe.capture.cutting.split_spec import AtCall
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.capture.tracing.signature import signature_of
from fleetpipe.dygraph.observe.profile import TYPICAL
from fleetpipe.errors import BoundaryError, CaptureError, ConfigError, PartitionError
from fleetpipe.profiling import LayerCost, Profile
from tests.capture.models import GPT, Tagger, UNet, images, require_bits, tokens


class Steps(nn.Layer):  # type: ignore[misc]
    """Four linear layers, of which the second is called again after the third."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))
        self.marked = marked

    def forward(self, x: Any) -> Any:
        x = self.b(self.a(x).tanh())
        if self.marked:
            fleetpipe.pipe_split()
        return self.d(self.b(self.c(x)))


def starts(model: Any, example: Any, split_spec: Any, **options: Any) -> list[int]:
    """Returns the first node of each stage but stage 0."""
    pipe = fleetpipe.pipeline(model, example, split_spec=split_spec, verify=False, **options)
    return [start - 1 for start in pipe.segment_parts[1:-1]]


X = paddle.ones([2, 3])


@pytest.mark.parametrize(
    ("split_spec", "expected"),
    [
        (["b"], [2]),
        (["c", "b"], [2, 3]),
        ({"c": SplitPoint.END, "b": SplitPoint.BEGINNING}, [2, 4]),
        # What has no stage goes with what ran before it, and a second call where it runs.
        ({"a": 0, "b": 1}, [2]),
        ({"a": 0, "c": 1}, [3]),
        ({"a": 0, "b": 0, "c": 1, "d": 2}, [3, 5]),
    ],
)
def test_the_model_is_cut_where_it_is_said(split_spec: Any, expected: list[int]) -> None:
    assert starts(Steps(), X, split_spec) == expected


def test_the_model_says_where_it_is_cut() -> None:
    assert starts(Steps(marked=True), X, None) == [3]
    model = Steps(marked=True)
    model.b.pipeline_stage, model.d.pipeline_stage = 0, 1
    assert starts(model, X, None) == [5]


def test_a_prefix_shares_its_sublayers_evenly() -> None:
    pipe = fleetpipe.pipeline(GPT(5), tokens(2), split_spec="blocks", num_stages=3, verify=False)
    first = [pipe.layers[start].__name__ for start in pipe.segment_parts[1:-1]]
    assert first == ["blocks.1.before", "blocks.3.before"]


class Hidden(nn.Layer):  # type: ignore[misc]
    """A layer without sublayers, which asks for a cut."""

    def forward(self, x: Any) -> Any:
        fleetpipe.pipe_split()
        return x * 2


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (["bb"], {}, ConfigError, "'bb', did you mean 'b'"),
    ({"layer9": 0}, {}, ConfigError, "'layer9', known: a, b, c, d"),
    (["a"], {}, ConfigError, "without a node"),
    ({"d": SplitPoint.END}, {}, ConfigError, "without a node"),
    (["b"], {"num_stages": 3}, ConfigError, "into 2 stages(.|\n)*expected: 3"),
    ({"a": 0, "c": 1, "d": 0}, {}, ConfigError, "'d' is in stage 0, and runs after"),
    ({"a": 0, "c": 2}, {}, ConfigError, "'c' is in stage 2"),
    ({"a": 0, "c": True}, {}, ConfigError, "no number of a stage"),
    (None, {}, ConfigError, "says nothing of stages"),
    ("a", {"num_stages": 2}, ConfigError, "no sublayer below"),
    (3, {}, ConfigError, "no form that is known"),
    ([3], {}, ConfigError, "no form that is known"),
]


@pytest.mark.parametrize(("split_spec", "options", "kind", "message"), REFUSED, ids=str)
def test_a_wrong_cut_is_refused(
    split_spec: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        starts(Steps(), X, split_spec, **options)


def test_a_mark_within_a_node_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_split_spec.py:\d+"):
        starts(nn.Sequential(nn.Linear(3, 3), Hidden()), X, None)


def test_running_statistics_of_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1D(3)
    model = nn.Sequential(norm, nn.Linear(3, 3), norm)
    with pytest.raises(
        CaptureError, match=r"'0._mean'(.|\n)*0 in stage 0(.|\n)*0 \(call 2\) in stage 1"
    ):
        starts(model, X, ["1"])


class Norms(nn.Layer):  # type: ignore[misc]
    """A batch norm that is called at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(3)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.b(self.a(self.norm(x)).tanh())) * 2)


def of_linears(seconds: list[float], stages: int, **options: Any) -> Choice:
    """Chooses a cut of linear layers that take so long; each holds and has one megabyte."""
    costs = [
        LayerCost(str(n), s / 2, s / 2, parameters=10**6, gradients=10**6, output=32, held=10**6)
        for n, s in enumerate(seconds)
    ]
    ends = LayerCost("inputs", 0, 0), LayerCost("outputs", 0, 0)
    named = {number: AtCall(str(number)) for number in range(1, len(seconds))}
    at = tuple(number + 1 for number in named)
    profile = Profile((ends[0], *costs, ends[1]), None, at, transfer=TYPICAL)
    return choose(profile, named, stages, **options)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    found = of_linears([4, 1, 1, 1, 3, 2], 3)
    # Of those with five at most, each border as late as can be.
    assert found.borders == (AtCall("2"), AtCall("5"))
    # What each border keeps both of its ranks busy with: 32 bytes, and their gradient.
    crossing = TYPICAL.sends(32) + TYPICAL.receives(32)
    assert found.seconds == pytest.approx((5 + crossing, 5 + 2 * crossing, 2 + crossing))
    assert found.bottleneck == max(found.seconds)
    assert found.bound == 4


def test_a_limit_of_memory_moves_the_cut() -> None:
    # 4 copies of the parameters; the first stage holds two forwards, the second one.
    assert of_linears([1, 1, 1, 5], 2).borders == (AtCall("3"),)
    assert of_linears([1, 1, 1, 5], 2, memory_cap=12.1e6).borders == (AtCall("2"),)
    with pytest.raises(PartitionError, match="fit into memory"):
        of_linears([1, 1, 1, 5], 2, memory_cap=9e6)


def test_the_former_name_of_the_cap_is_taken_with_one_warning() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for name, cap in (("memory_cap", "10 B"), ("memory_limit", 10)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", DeprecationWarning)
            with pytest.raises(PartitionError, match="fit into memory"):
                fleetpipe.pipeline(plain, X, num_stages=2, verify=False, **{name: cap})
        mine = [str(one.message) for one in told if one.filename == __file__]
        assert mine == ["memory_limit is memory_cap now"] * (name == "memory_limit")


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_same_model_gets_the_same_cut_whatever_the_noise(stages: int) -> None:
    # Twelve blocks, within which more is alive than between them.
    seconds, sizes = [1, 16, 6, 3, 1, 16, 4, 16, 1], [2, 2, 2, 2, 1, 2, 2, 2, 1]
    named = {number: AtCall(str(number)) for number in range(1, 12 * len(seconds))}
    at = tuple(number + 1 for number in named)
    ends = LayerCost("inputs", 0, 0), LayerCost("outputs", 0, 0)
    found = set()
    for seed in range(20):
        numbers = random.Random(seed)
        noisy = [numbers.uniform(0.95, 1.1) * s / 1000 for s in seconds]
        block = [LayerCost("", s / 2, s / 2, output=size * 2**14) for s, size in zip(noisy, sizes)]
        profile = Profile((ends[0], *block * 12, ends[1]), None, at, transfer=TYPICAL)
        found.add(choose(profile, named, stages).borders)
    assert found == {
        tuple(AtCall(str(len(seconds) * 12 // stages * stage)) for stage in range(1, stages))
    }


def test_no_cut_parts_the_calls_of_what_keeps_running_statistics() -> None:
    capturing = Capturer(Norms(), paddle.randn([4, 3]))
    look = signature_of(capturing.example)
    training, evaluation = capturing(look, True), capturing(look, False)
    # norm, a, tanh, b, norm again, the product, last.
    found, refused = find_cut_points(training, evaluation)
    assert list(found) == [5, 6]
    assert set(refused) == {1, 2, 3, 4}
    assert all("'norm._mean' is used on both sides" in reason for reason in refused.values())


def add(y: Any) -> Any:
    return y.add_(paddle.ones_like(y))


def relu(y: Any) -> Any:
    return nn.functional.relu_(y)


def index(y: Any) -> Any:
    y[:, 0] = 1.0
    return y


def fill(y: Any) -> Any:
    """Writes into two parts of zeros."""
    out = paddle.zeros([y.shape[0], 8])
    out[:, :4] = y[:, :4]
    out[:, 4:] = 2 * y[:, 4:]
    return out


class Writes(nn.Layer):  # type: ignore[misc]
    """Layers with what writes in place between them, and a buffer that an operation made."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", paddle.linspace(0, 1, 8))
        self.register_buffer("drawn", paddle.rand([8]))
        self.write = write

    def forward(self, x: Any) -> Any:
        skip = self.a(x) * self.steps
        x = self.write(self.b(skip)) + skip
        return self.c(x * self.drawn)


@pytest.mark.once_for("index", "fill")
@pytest.mark.parametrize("write", [add, relu, index, fill])
def test_nodes_that_write_in_place_are_measured(write: Callable[[Any], Any]) -> None:
    inputs = paddle.randn([8, 8])
    found = fleetpipe.explain(Writes(write), inputs, measure=True)
    assert found.costs is not None
    assert [cost.name for cost in found.costs] == [node.name for node in found.trace.nodes]
    assert all(cost.forward > 0 for cost in found.costs)
    require_bits(lambda: Writes(write), [inputs, inputs], loss_fn=lambda out, _: out.mean())


def test_nodes_that_do_the_same_cost_the_same() -> None:
    class Alike(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LayerList([nn.Linear(8, 8) for _ in range(4)])
            self.last = nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = nn.functional.relu(layer(x))
            return self.last(x)

    found = fleetpipe.explain(Alike(), paddle.randn([4, 8]), measure=True)
    costs = found.costs
    assert costs is not None
    assert "F ms" in str(found)
    times = [(cost.forward, cost.backward) for cost in costs]
    assert len(set(times[0:8:2])) == len(set(times[1:8:2])) == 1
    assert len(set(times)) == 3


@pytest.mark.parametrize(("model", "data"), [(UNet, images(8, 16)), (Tagger, [tokens(8, 5)] * 2)])
def test_auto_is_what_a_pipeline_does_by_default(model: Any, data: list[Any]) -> None:
    done = require_bits(model, data, loss_fn=lambda out, _: out.mean(), steps=1)
    assert done.pipe.choice.bottleneck >= done.pipe.choice.bound
    assert "no cut below" in str(done.pipe.choice)


class Before(nn.Layer):  # type: ignore[misc]
    """A layer that takes what the one before has kept."""

    def __init__(self, before: Any = None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(3, 3), [before]

    def forward(self, x: Any) -> Any:
        self.kept = self.linear(x)
        return self.kept if self.before[0] is None else self.kept + self.before[0].kept


class Forwards(Norms):
    """Calls the forwards of its layers."""

    def forward(self, x: Any) -> Any:
        return self.b.forward(self.a.forward(x))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: (first := Before(), Before(first)), BoundaryError, "keeps a tensor beside"),
        (lambda: (Forwards(),), PartitionError, "self.block.forward.x. is no call of it"),
    ],
)
def test_a_model_that_cannot_be_measured_or_cut_is_refused_with_its_cause(
    build: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fleetpipe.pipeline(nn.Sequential(*build()), paddle.ones([2, 3]), num_stages=2)


def test_gradients_may_be_off_where_a_pipeline_is_made() -> None:
    with paddle.no_grad():
        pipe = fleetpipe.pipeline(Norms(), paddle.rand([2, 3]), num_stages=2)
    assert pipe.proof.gradients == 8


def test_auto_needs_to_know_of_how_many_stages() -> None:
    with pytest.raises(ConfigError, match="needs the number of stages"):
        fleetpipe.pipeline(UNet(), images(2, 16)[0])


class Gate(nn.Layer):  # type: ignore[misc]
    """A gate of an image's channels, made of what each is on average."""

    def __init__(self) -> None:
        super().__init__()
        self.less, self.more = nn.Conv2D(4, 2, 1), nn.Conv2D(2, 4, 1)

    def forward(self, x: Any) -> Any:
        mean = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * nn.functional.sigmoid(self.more(nn.functional.relu(self.less(mean))))


def test_a_result_that_stands_for_its_tensor_in_the_graph_is_measured() -> None:
    model = nn.Sequential(nn.Conv2D(4, 4, 1), Gate(), nn.Conv2D(4, 4, 1))
    pipe = fleetpipe.pipeline(model, paddle.ones([2, 4, 3, 3]), num_stages=2)
    assert pipe.proof.gradients == 8
