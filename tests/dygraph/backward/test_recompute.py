"""Recompute: the same bits, activations that are gone, buffers that are counted once."""

from __future__ import annotations

import gc
import random
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.backward import recompute
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.dygraph.models import MODELS, WIDTH, Attention, FeedForward, gradients_in_w
from tests.pipelines import (
    CLASSES,
    FEATURES,
    Trained,
    adam,
    batch,
    bits,
    job,
    mlp_layers,
    model_in_job,
    pipeline,
    train,
)

#: What a PyLayer may save beside tensors; not on 2.6.2, where Paddle's hooks refuse it.
NOTHING = [] if paddle.__version__ < "3" else [None]

CONTEXT = {"mp_group": None, "offload": False, "partition": False}

#: (p, v, schedule), of which the last two split backward.
RUNS = [
    (1, 1, "1F1B"),
    (2, 1, "1F1B"),
    (3, 1, "FThenB"),
    (2, 2, "Interleaved1F1B"),
    (2, 1, "ZBH1"),
    (2, 2, "ZBV"),
]
#: Each run with one layer in a piece, or with two.
PAIRS = [(run, 1 + number % 2) for number, run in enumerate(RUNS)]


def dropout_layers() -> list[Any]:
    """Linear, BatchNorm and dropout layers and functions; 12 entries."""
    layers: list[Any] = []
    width = FEATURES
    for _ in range(4):
        layers += [
            LayerDesc(nn.Linear, width, 8),
            LayerDesc(nn.BatchNorm1D, 8),
            lambda x: nn.functional.dropout(nn.functional.relu(x), 0.3),
        ]
        width = 8
    return [*layers[:-1], LayerDesc(nn.Linear, 8, CLASSES)]


def trained(
    layers: list[Any], interval: int, run: tuple[int, int, str] = (2, 1, "1F1B"), **options: Any
) -> Trained:
    """Trains with an interval of recompute."""
    ranks, chunks, schedule = run
    return train(
        *(layers, ranks, schedule),
        optimizer=adam,
        gradients=True,
        num_virtual_pipeline_stages=chunks,
        recompute_interval=interval,
        recompute_ctx=CONTEXT,
        **options,
    )


@pytest.mark.parametrize(("run", "interval"), [*PAIRS, *((run, 100) for run in RUNS[1::4])])
def test_bits_with_dropout_and_batch_norm(run: tuple[int, int, str], interval: int) -> None:
    assert trained(dropout_layers(), interval, run) == trained(dropout_layers(), 0, run)


class Mapping(nn.Layer):
    """Takes and gives a dict; one entry needs no gradient, one passes through unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, dict):
            x = {"x": x, "all": (x, x * 2), "mask": (x > 0).astype("float32"), "number": 3}
        y = self.up(x["x"]) * x["mask"] + sum(x["all"]) + x["x"]
        return {**x, "x": y, "mask": (y.detach() > 0).astype("float32")}


def mapping_layers() -> list[Any]:
    entries = [LayerDesc(Mapping) for _ in range(4)]
    return [LayerDesc(nn.Linear, FEATURES, WIDTH), *entries, lambda x: x["x"] + x["all"][1]]


def to_loss(output: Any, label: Any) -> Any:
    return ((output - label.astype("float32").mean()) ** 2).mean()


@pytest.mark.parametrize(("run", "interval"), PAIRS)
def test_dicts_tuples_and_values_without_gradient(run: tuple[int, int, str], interval: int) -> None:
    plain = trained(mapping_layers(), 0, run, loss_fn=to_loss)
    assert trained(mapping_layers(), interval, run, loss_fn=to_loss) == plain


class Sole(nn.Layer):
    """Gives a tuple of one value, and takes what Fleet makes of one where a piece begins."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        assert isinstance(x, paddle.Tensor)
        return (self.up(x),)


@pytest.mark.parametrize("run", RUNS)
def test_a_tuple_of_one_is_taken_apart_where_a_piece_begins(run: tuple[int, int, str]) -> None:
    ends = [LayerDesc(nn.Linear, FEATURES, WIDTH)], [LayerDesc(nn.Linear, WIDTH, WIDTH)]
    layers = [ends[0][0], *[LayerDesc(Sole) for _ in range(4)], ends[1][0]]

    def in_a_tuple(micro_batches: int, seed: int) -> list[Any]:
        inputs, labels = batch(micro_batches, seed)
        return [(inputs,), labels]

    found = trained(layers, 1, run, data=in_a_tuple, loss_fn=to_loss)
    plain = [ends[0][0], *[LayerDesc(nn.Linear, WIDTH, WIDTH) for _ in range(4)], ends[1][0]]
    expected = trained(plain, 0, run, loss_fn=to_loss)
    assert found.losses == expected.losses
    assert [*found.state.values()] == [*expected.state.values()]
    assert [*found.gradients.values()] == [*expected.gradients.values()]


def tied_layers() -> list[Any]:
    def tied() -> Any:
        return SharedLayerDesc("tied", nn.Linear, times, "weight", WIDTH, WIDTH)

    def times(layer: Any, x: Any) -> Any:
        return nn.functional.dropout(layer(x), 0.2)

    return [
        LayerDesc(nn.Linear, FEATURES, WIDTH),
        *[entry for _ in range(3) for entry in (tied(), LayerDesc(FeedForward))],
        tied(),
    ]


@pytest.mark.parametrize(("run", "interval"), [*zip(RUNS[:2] + RUNS[3:], (1, 2, 3, 1, 3))])
def test_a_shared_layer_used_several_times(run: tuple[int, int, str], interval: int) -> None:
    plain = trained(tied_layers(), 0, run, loss_fn=to_loss)
    assert trained(tied_layers(), interval, run, loss_fn=to_loss) == plain


def test_a_piece_that_writes_into_its_input() -> None:
    linear, write = LayerDesc(nn.Linear, 8, 8), nn.functional.relu_
    layers = [LayerDesc(nn.Linear, FEATURES, 8), linear, write, linear, write]
    layers.append(LayerDesc(nn.Linear, 8, CLASSES))
    # Each piece but the first begins with a write.
    assert trained(layers, 2, RUNS[0]) == trained(layers, 0, RUNS[0])


class Drawing(nn.Layer):
    """Draws from NumPy and from Python, and has a buffer that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return self.inner(x) * (np.random.rand() + random.random() + 0.1 * self.calls)


@pytest.mark.parametrize("rng", ["keyed", "fleet"])
def test_other_generators_and_buffers_are_as_in_the_forward(rng: str) -> None:
    def run(interval: int) -> dict[str, bytes]:
        layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Drawing), LayerDesc(nn.Dropout)]
        random.seed(1)
        np.random.seed(1)
        with job(2, 4, "FThenB", rng=rng):
            paddle.seed(3)
            model = pipeline(
                [*layers, *layers[1:], LayerDesc(nn.Linear, 8, CLASSES)],
                recompute_interval=interval,
                recompute_ctx=CONTEXT,
            )
            model.forward_backward_pipeline(batch())
            grads = {n: p.grad.numpy().tobytes() for n, p in model.layers.named_parameters()}
            after = repr((np.random.rand(), random.random())).encode()
            drawn = paddle.rand([3]).numpy().tobytes()
            return {**grads, **bits(model.layers.state_dict()), "after": after, "drawn": drawn}

    assert run(1) == run(0)
    assert run(2) == run(0)


class Keeping(nn.Layer):
    """Keeps something from one micro-batch to the next, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner, self.calls, self.memory = way, nn.Linear(8, 8), 0, None
        self.seen: list[Any] = []
        self.own = np.random.default_rng(0)
        size = 8 if way == "late" else 2**13
        self.register_buffer("centre", paddle.zeros([size]))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        y = self.inner(x) * (1 + 0.1 * self.calls)
        if self.way == "attribute":
            # None, and a buffer from the first call on.
            y = y if self.memory is None else y + 0.5 * self.memory
            self.memory = y.detach()
        elif self.way == "assigned":
            self.seen = [*self.seen, y.detach()]
            y = y * len(self.seen)
        elif self.way == "list":
            self.seen.append(y.detach())
            y = y * len(self.seen)
        elif self.way in ("generator", "noise"):
            y = y * (float(self.own.random()) * (1 if self.way == "generator" else 1e-6) + 1)
        elif self.way == "anew":
            self.centre = self.centre + y.detach().mean()
        elif self.way == "set" and self.calls > 6:
            self.centre.set_value(self.centre + 1.0)
        elif self.way == "early" or self.calls > 6:
            self.centre.add_(paddle.ones_like(self.centre))
        return y + self.centre[:8]


def keep(way: str, interval: int, schedule: str = "1F1B") -> Trained:
    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Keeping, way), LayerDesc(Keeping, way)]
    return trained([*layers, LayerDesc(nn.Linear, 8, CLASSES)], interval, (2, 1, schedule))


WAYS = ["attribute", "assigned", "list", "anew", "early", "late", "late large", "set"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("schedule", "interval"), [("1F1B", 1), ("FThenB", 2)])
def test_what_layers_keep_is_as_in_the_forward(way: str, schedule: str, interval: int) -> None:
    assert keep(way, interval, schedule) == keep(way, 0, schedule)


def test_what_cannot_be_as_in_the_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"other numbers .*[\s\S]*layers 2 to 2 .Keeping"):
        keep("generator", 1)


def test_on_a_card_only_other_last_bits_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "device_kind", lambda: "gpu")
    assert keep("noise", 1)
    with pytest.raises(ConfigError, match="other numbers"):
        keep("generator", 1)


class Record:
    """Where layers leave what a loss adds up, with and without a gradient."""

    of_class: ClassVar[list[Any]] = []
    __slots__ = ("__dict__", "hidden")

    def __init__(self) -> None:
        self.of_object: list[Any] = []
        self.total: Any = 0
        self.hidden: list[Any] = []


RECORD, LOSSES = Record(), []


def leave(way: str, value: Any) -> None:
    """Leaves an auxiliary loss in one of several places."""
    if way == "total":
        RECORD.total = RECORD.total + value
    elif way == "figures":
        LOSSES.append(float(value))
    else:
        places = {"list": LOSSES, "class": Record.of_class, "object": RECORD.of_object}
        places.get(way, RECORD.hidden).append(value)


class Auxiliary(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(8, 8)
        if way == "hook":
            self.register_forward_post_hook(lambda *call: LOSSES.append(call[2].mean()))
        self.way = way

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        if self.way != "hook":
            leave(self.way, y.square().mean())
        return y


def with_auxiliary(output: Any, label: Any) -> Any:
    kept = LOSSES, Record.of_class, RECORD.of_object, RECORD.hidden
    loss = nn.functional.cross_entropy(output, label) + sum(map(sum, kept)) + RECORD.total
    RECORD.total = 0
    for losses in kept:
        losses.clear()
    return loss


def auxiliary(way: str, interval: int) -> Trained:
    layers = [LayerDesc(nn.Linear, FEATURES, 8), *(LayerDesc(Auxiliary, way) for _ in range(2))]
    layers.append(LayerDesc(nn.Linear, 8, CLASSES))
    return trained(layers, interval, (2, 1, "1F1B"), seg_method=[0, 1, 4], loss_fn=with_auxiliary)


@pytest.mark.parametrize("way", ["list", "class", "object", "total", "figures", "hook"])
@pytest.mark.parametrize("interval", [1, 2])
def test_auxiliary_losses_of_layers_are_left_once(way: str, interval: int) -> None:
    assert auxiliary(way, interval) == auxiliary(way, 0)


def test_a_loss_that_reads_what_the_second_run_left_is_refused() -> None:
    with pytest.raises(ConfigError, match="return it with the output"):
        auxiliary("where no name leads", 1)
    assert paddle.is_grad_enabled()


def test_memory_of_a_stage() -> None:
    from fleetpipe.paddle_api.device import allocated_bytes

    held: dict[int, list[int]] = {0: [], 4: []}
    for interval in held:
        with job(1, 1):
            model = PipelineLayer(
                [LayerDesc(nn.Linear, 64, 64) for _ in range(16)],
                num_stages=1,
                recompute_interval=interval,
                recompute_ctx=CONTEXT,
            )
            x = paddle.randn([512, 64])
            x.stop_gradient = False
            # In the first call it is not known whether layers differentiate in their forwards.
            for _ in range(2):
                before = allocated_bytes()
                output = model(x)
                held[interval].append(allocated_bytes() - before)
                output.sum().backward()
    rows = 512 * 64 * 4
    assert max(held[4]) <= 5 * rows
    assert min(held[0]) >= 15 * rows


def reruns() -> list[int]:
    return sorted(id(one) for one in gc.get_objects() if type(one) is recompute._Rerun)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_nothing_is_left_after_a_batch_without_the_collector(schedule: str) -> None:
    with job(2, 4, schedule):
        model = pipeline(dropout_layers(), recompute_interval=2, recompute_ctx=CONTEXT)
        model.forward_backward_pipeline(batch())
        gc.collect()
        # A batch of another test that failed on its way may have left some.
        before = reruns()
        gc.disable()
        try:
            model.forward_backward_pipeline(batch())
            left = reruns()
        finally:
            gc.enable()
    assert left == before


def test_each_piece_runs_twice_and_no_more() -> None:
    for run, interval in (((2, 1, "1F1B"), 2), ((2, 1, "ZBH1"), 2), ((2, 1, "ZBH1"), 100)):

        class Counted(nn.Linear):
            # A list would get back what it held before a second run.
            seen: tuple[bool, ...] = ()

            def forward(self, x: Any) -> Any:
                Counted.seen += (recompute.rerunning(),)
                return super().forward(x)

        layers = [LayerDesc(Counted, FEATURES, 8), *(LayerDesc(Counted, 8, 8) for _ in range(5))]
        trained(layers, interval, run, loss_fn=to_loss)
        # Three batches of 4 micro-batches; the first piece takes data, which needs no gradient.
        first = min(interval, 3)
        assert Counted.seen.count(False) == 72
        assert Counted.seen.count(True) == 12 * (6 - first)


def test_what_needs_no_recompute_is_not_recomputed() -> None:
    seen: list[bool] = []

    def spy(x: Any) -> Any:
        seen.append(recompute.is_in_piece())
        return x * 1.0

    layers = [nn.Linear(FEATURES, 8), spy, nn.ReLU(), spy, nn.Linear(8, CLASSES), spy]
    with model_in_job(1, 2, layers=layers, recompute_interval=2, recompute_ctx=CONTEXT) as model:
        model.forward_backward_pipeline(batch(2))
        # The first piece takes data, the second has no parameters; the third runs a second time.
        assert seen == [False, False, True] * 2
        seen.clear()
        model.eval_batch(batch(2), compute_loss=True)
        assert not any(seen)


def test_recomputed_weights_do_not_wait_in_a_split_backward() -> None:
    with model_in_job(2, 4, "ZBH1", recompute_interval=1, recompute_ctx=CONTEXT) as model:
        model.forward_backward_pipeline(batch())
        assert gradients_in_w(model._runtime.stage.split) == ["0.weight", "0.bias"]


def test_profile_runs_recomputed_layers() -> None:
    with job(2, 2):
        model = pipeline(dropout_layers(), recompute_interval=2, recompute_ctx=CONTEXT)
        before = bits(model.layers.state_dict())
        assert len(model.profile(batch(2))["forward"]) == 2
        assert bits(model.layers.state_dict()) == before


class Changing(nn.Linear):
    """Does something else when it is called again."""

    def forward(self, x: Any) -> Any:
        x = super().forward(x)
        return x if recompute.rerunning() else nn.functional.sigmoid(x)


class Failing(nn.Linear):
    def forward(self, x: Any) -> Any:
        if recompute.rerunning():
            raise KeyError("mine")
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(Changing, ConfigError, "fewer tensors"), (Failing, KeyError, "mine")],
)
def test_what_goes_wrong_in_the_second_run_is_told(
    kind: Any, error: type[Exception], message: str
) -> None:
    with job(2, 2):
        layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(kind, 8, CLASSES)]
        model = pipeline(layers, recompute_interval=1, recompute_ctx=CONTEXT)
        with pytest.raises(error, match=message):
            model.forward_backward_pipeline(batch(2))
    assert not recompute.is_in_piece()
    assert not recompute.rerunning()


def test_a_failure_of_the_users_own_backward_is_not_told_of_a_later_batch() -> None:
    failing = True

    class Sometimes(nn.Linear):
        def forward(self, x: Any) -> Any:
            if failing and recompute.rerunning():
                raise KeyError("mine")
            return super().forward(x)

    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Sometimes, 8, CLASSES)]
    with job(2, 2):
        model = pipeline(
            layers, recompute_interval=1, recompute_ctx=CONTEXT, loss_fn=lambda x, _: x.mean()
        )
        with pytest.raises(Exception, match=r"."):
            model(batch(2)[0]).sum().backward()
        assert paddle.is_grad_enabled()
        failing = False
        model.layers.clear_gradients()
        model.forward_backward_pipeline(batch(2))
    assert recompute.cause_of(ValueError("another")).args == ("another",)


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = nn.functional.sigmoid(super().forward(x))
            y.add_(paddle.ones([1]))
            return y

    with job(1, 1):
        layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Wrong, 8, CLASSES)]
        model = pipeline(layers, recompute_interval=1, recompute_ctx=CONTEXT)
        with pytest.raises(ConfigError, match="changed in place"):
            model.forward_backward_pipeline(batch(1))


class Cubed(paddle.autograd.PyLayer):
    """Saves a tensor that its backward's own gradient leads through."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensor()
        return grad * 3 * x * x


class OfPyLayer(nn.Linear):
    """Adds the slope of a PyLayer."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        (slope,) = paddle.grad(Cubed.apply(y).sum(), [x], create_graph=True)
        return y + (slope**2).mean()


class InnerHead(nn.Linear):
    """Runs a backward of its own."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        super().forward(x.detach()).mean().backward()
        return y


@pytest.mark.parametrize("interval", [1, 2])
def test_gradients_of_a_pylayer_within_a_piece(interval: int) -> None:
    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(OfPyLayer, 8, 8)]
    layers += [LayerDesc(OfPyLayer, 8, 8), LayerDesc(nn.Linear, 8, CLASSES)]
    assert trained(layers, interval) == trained(layers, 0)


class Hooked(nn.Linear):
    """Saves by hooks of its own."""

    def forward(self, x: Any) -> Any:
        with paddle.autograd.saved_tensors_hooks(lambda x: x, lambda x: x):
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InnerHead, r"runs backward\(\) in its forward"),
        pytest.param(
            *(Hooked, "set recompute_interval=0"),
            marks=pytest.mark.skipif(
                paddle.__version__ < "3", reason="an error of Paddle's own on 2.6.2"
            ),
        ),
    ],
)
def test_what_a_piece_cannot_do_is_refused_with_what_helps(kind: Any, message: str) -> None:
    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(kind, 8, CLASSES)]
    with pytest.raises(FleetPipeError, match=message):
        trained(layers, 1)
    assert trained(layers, 0).losses


class Penalized(nn.Linear):
    """Adds how its output depends on its input: a gradient within the forward."""

    asks = True

    def forward(self, x: Any) -> Any:
        y = paddle.tanh(super().forward(x))
        if not self.asks or not paddle.is_grad_enabled():
            return y
        (slope,) = paddle.grad(y.sum(), [x], create_graph=True)
        (again,) = paddle.grad((y * y).sum(), [x], create_graph=True)
        return y + slope.sum(axis=1, keepdim=True) + again.mean()


@pytest.mark.parametrize(("run", "interval"), PAIRS)
def test_gradients_within_a_piece(run: tuple[int, int, str], interval: int) -> None:
    # The first piece is not recomputed, and its backward may be split.
    kinds = [nn.Linear, nn.Linear, Penalized, nn.Linear, Penalized, Penalized]
    sizes = [FEATURES, 8, 8, 8, 8, 8, CLASSES]
    layers = [LayerDesc(*described) for described in zip(kinds, sizes, sizes[1:])]
    ranks, chunks, _ = run
    whole = trained(layers, 0, (ranks, chunks, "Interleaved1F1B" if chunks > 1 else "1F1B"))
    assert whole.gradients
    assert trained(layers, interval, run) == whole


def test_gradients_that_only_later_calls_ask_for_are_refused() -> None:
    layers = [LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Penalized, 8, CLASSES)]
    with model_in_job(1, 2, layers=layers, recompute_interval=1, recompute_ctx=CONTEXT) as model:
        Penalized.asks = False
        try:
            model.forward_backward_pipeline(batch(2))
        finally:
            Penalized.asks = True
        with pytest.raises(ConfigError, match="in its first call did not"):
            model.forward_backward_pipeline(batch(2))
        assert paddle.is_grad_enabled()


def test_layers_that_use_pylayers_and_fleets_own_recompute() -> None:
    class Scaled(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            y = paddle.tanh(x)
            ctx.save_for_backward(y, weight, *NOTHING)
            return y * weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            y, weight, *nothing = ctx.saved_tensor()
            assert nothing == NOTHING
            assert weight.of_the_users_own == "attribute"
            return grad * weight * (1 - y * y), (grad * y).sum([0, 1])

    class Block(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()
            self.forward_part = FeedForward()
            self.scale = self.create_parameter([WIDTH])
            self.scale.of_the_users_own = "attribute"

        def forward(self, x: Any) -> Any:
            scaled = Scaled.apply(self.attention(x), self.scale)
            return fleet.utils.recompute(self.forward_part, scaled)

    model = MODELS["gpt"]

    def layers() -> list[Any]:
        first, *_, norm, last = model.layers()
        return [first, LayerDesc(Block), LayerDesc(Block), norm, last]

    plain = trained(layers(), 0, data=model.batch, loss_fn=model.loss)
    assert trained(layers(), 2, data=model.batch, loss_fn=model.loss) == plain


def test_the_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="recompute_ctx"):
        PipelineLayer(mlp_layers(), num_stages=1, recompute_interval=1)
    for interval in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="number of layers"):
            PipelineLayer(
                mlp_layers(), num_stages=1, recompute_interval=interval, recompute_ctx=CONTEXT
            )
