"""Batches of several sizes: what may be read of them; and a tower for images before a decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from examples.qwen_vl import IMAGE, PAD, QwenVL, Sizes, collate
from fleetpipe import fleet
from fleetpipe.capture.cutting.auto import choose, find_cut_points, measure_nodes
from fleetpipe.capture.running import variants
from fleetpipe.capture.tracing import capturing
from fleetpipe.capture.tracing.capturing import Capturer
from fleetpipe.errors import CaptureError, ConfigError, PartitionError
from tests.capture.models import images, require_bits, trained
from tests.pipelines import accumulate, begin, bits, job

functional = nn.functional
X = paddle.to_tensor(np.arange(48, dtype="float32").reshape([8, 6]) % 7 - 3)
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)

#: Code in the model's own forward: it takes what a convolution made, and the size of the inputs.
Code = Callable[[Any, Any], Any]


class Pictures(nn.Layer):  # type: ignore[misc]
    """Three convolutions; the size of the images is asked for first, and used in each stage."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2D(3, 4, 3, padding=1), nn.Conv2D(4, 4, 3, padding=1)
        self.last, self.code = nn.Conv2D(4, 2, 1), code

    def forward(self, x: Any) -> Any:
        size = paddle.shape(x)
        h = self.code(self.first(x), size)
        h = self.code(self.second(h), size)
        return functional.interpolate(self.last(h), size[2:], mode="bilinear")


def interpolated(h: Any, size: Any) -> Any:
    return functional.interpolate(functional.avg_pool2d(h, 2), size[2:], mode="bilinear")


def pooled(h: Any, size: Any) -> Any:
    high, wide = paddle.shape(h)[2:].tolist()
    return functional.adaptive_avg_pool2d(h, [high, wide]) + functional.adaptive_avg_pool2d(h, 1)


def reshaped(h: Any, size: Any) -> Any:
    rows, high, wide = size[0], int(paddle.shape(h)[2]), size[3]
    return h.reshape([rows, 4, -1]).reshape([rows, 4, high, wide]) * 2


def made(h: Any, size: Any) -> Any:
    row = paddle.arange(int(size[2] * size[3])).astype("float32").reshape([1, 1, size[2], size[3]])
    return h + paddle.zeros([size[0], 1, size[2], 1]) + row / float(paddle.numel(h))


def compared(h: Any, size: Any) -> Any:
    rows, _, high, _ = size.numpy()
    h = h * 2 if size[2] > 4 and rows < 100 else h
    return h if (size[2:] % 2 == 0).all() else h + int(high)


def sliced(h: Any, size: Any) -> Any:
    half = paddle.shape(h)[2] // 2
    return paddle.concat([h[:, :, half:], h[:, :, :half]], 2)


@pytest.mark.parametrize("code", [interpolated, pooled, reshaped, made, compared, sliced])
def test_sizes_of_a_look_are_read_and_cross_to_other_stages(code: Code) -> None:
    with job(3):
        done = trained(
            lambda: Pictures(code),
            [images(8, 8)[0], paddle.ones([8])],
            loss_fn=lambda output, label: (output.mean([1, 2, 3]) - label).square().mean(),
            split_spec=["second", "last"],
            verify=code is compared,
        )
        assert done.differing == []
        done.plain.eval()
        # Other images, and rows: each look has its own sizes, odd ones too.
        for rows, size in ((2, 6), (1, 9)):
            other = images(rows, size)[0]
            assert np.array_equal(done.model.predict_batch(other), done.plain(other))


class Rows(nn.Layer):  # type: ignore[misc]
    """Code between linear layers, in the model's own forward."""

    def __init__(self, code: Callable[[Any, Any], Any], middle: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle, self.code = middle or nn.Linear(6, 6), code

    def forward(self, x: Any) -> Any:
        return self.last(self.code(self, self.first(x)))


def of_some_rows(self: Any, x: Any) -> Any:
    rows = x[(x[:, 0] > 0) | (paddle.arange(x.shape[0]) == 0)]
    return x + self.middle(rows).reshape([-1, rows.shape[-1]]).mean(0) / len(rows.shape)


def scattered(self: Any, x: Any) -> Any:
    found = paddle.nonzero((x[:, 0] > 0) | (paddle.arange(x.shape[0]) == 0))
    return paddle.scatter_nd_add(self.middle(x), found, x.gather(found.flatten()))


def a_loss_of_some(self: Any, x: Any) -> Any:
    mask = paddle.arange(x.shape[0] * 6).reshape(x.shape) % 2 == 0
    some = (x[:, 0] > 0) | (paddle.arange(x.shape[0]) == 0)
    share = paddle.numel(x[some]).astype("float32") / paddle.numel(x).astype("float32")
    return self.middle(x) * share + x[mask].mean() * x[mask].shape[0]


def cut_by_numbers(self: Any, x: Any) -> Any:
    count = (x > 0).sum() % 5 + 1
    return self.middle(x) + x[:, :count].sum(1, keepdim=True)


class Steps(nn.Layer):  # type: ignore[misc]
    """Counts, as rotary embeddings do."""

    def forward(self, count: int) -> Any:
        return paddle.arange(count).astype("float32")


def test_a_size_that_a_layer_makes_of_a_number_is_no_read() -> None:
    def code(self: Any, x: Any) -> Any:
        steps = self.middle(x.shape[1])
        return x * steps.reshape([1, steps.shape[0]])

    require_bits(lambda: Rows(code, Steps()), [X, LABELS], ["last"], steps=1, verify=True)


def test_a_check_that_raises_an_error_is_made_in_each_batch() -> None:
    def code(self: Any, x: Any) -> Any:
        if (x.abs() > 1e6).any():
            raise ValueError("too large")
        return self.middle(x)

    line = code.__code__.co_firstlineno + 1
    with job(2):
        done = trained(lambda: Rows(code), [X, LABELS], split_spec=["last"], steps=1, verify=True)
        assert done.differing == []
        with pytest.raises(CaptureError, match=rf"does not pass a check(.|\n)*sizes.py:{line}"):
            done.model.forward_backward_pipeline([X * 1e9, LABELS])


@pytest.mark.parametrize("code", [of_some_rows, scattered, a_loss_of_some, cut_by_numbers])
def test_sizes_that_nobody_reads_may_depend_on_numbers(code: Callable[[Any, Any], Any]) -> None:
    require_bits(lambda: Rows(code), [X, LABELS], ["last"], verify=True)


class Cut(nn.Layer):  # type: ignore[misc]
    """Keeps as many columns as its numbers say."""

    def forward(self, x: Any) -> Any:
        return x[:, : 1 + int((x > 0).sum()) % 5]


class Gate(nn.Layer):  # type: ignore[misc]
    """Returns what it is given, or something else."""

    def forward(self, x: Any) -> Any:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_size_that_a_layer_makes_of_numbers_shows_when_it_runs_again() -> None:
    def code(self: Any, x: Any) -> Any:
        return x / self.middle(x).shape[1]

    line = code.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"reads a size that depends(.|\n)*sizes.py:{line}"):
        fleetpipe.pipeline(Rows(code, Cut()), X[:2], split_spec=["last"])


def test_a_layer_that_returns_what_it_is_given_is_one_value_more() -> None:
    def code(self: Any, x: Any) -> Any:
        return x + self.middle(x)

    data = [paddle.concat([X[:4], -X[:4]]), LABELS]
    require_bits(lambda: Rows(code, Gate()), data, ["last"], verify=True)


def test_what_numbers_are_written_into_is_no_size_any_more() -> None:
    def code(self: Any, x: Any) -> Any:
        sizes = paddle.zeros([2])
        width = float(sizes.shape[0] + sizes[0])
        sizes[0] = x.sum()
        return x / width if sizes[0] > 0 else x

    line = code.__code__.co_firstlineno + 4
    with pytest.raises(CaptureError, match=rf"reads the numbers(.|\n)*sizes.py:{line}"):
        fleetpipe.pipeline(Rows(code), X[:2], split_spec=["last"])


class Pair(NamedTuple):
    """Two tensors."""

    left: Any
    right: Any


class Difference(nn.Layer):  # type: ignore[misc]
    """Takes two tensors in one argument."""

    def forward(self, pair: Pair) -> Any:
        return pair.left - pair.right


def test_values_in_a_named_tuple_reach_the_layer_in_another_stage() -> None:
    def code(self: Any, x: Any) -> Any:
        return self.middle(Pair(x, x.tanh()))

    require_bits(lambda: Rows(code, Difference()), [X, LABELS], ["middle"])


def test_a_forward_runs_twice_in_each_mode_whatever_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reads(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            calls.append(self)
            return self.inner(x) * float(x.sum() > 0)

    calls: list[Any] = []
    runs: list[Any] = []
    kinds = [type(f"Reads{number}", (Reads,), {}) for number in range(5)]
    traced = capturing.record
    monkeypatch.setattr(capturing, "record", lambda *given: runs.append(0) or traced(*given))
    model = nn.Sequential(nn.Linear(6, 6), *(kind() for kind in kinds))
    fleetpipe.explain(model, X[:2])
    # The first run finds all five, and is made again.
    assert (len(runs), len(calls)) == (4, 5 * 5)


SIZES = Sizes(32, width=16, layers=2, heads=2, vision_width=8, vision_layers=3, full=(1,))
LENGTH, MICRO_BATCHES = 20, 4

#: The images of a micro-batch: for each of its two texts, their heights and widths in tokens.
Images = tuple[tuple[tuple[int, int], ...], ...]
TEXT: Images = ((), ())
IMAGES: Images = (((2, 2),), ((2, 3), (1, 2)))
ONE: Images = ((), ((3, 3),))

#: The micro-batches of each step: with images, then text first, then text alone, then others.
STEPS: list[list[Images]] = [
    [IMAGES, TEXT, ONE, IMAGES],
    [TEXT, IMAGES, (((2, 2),), ()), TEXT],
    [TEXT] * 4,
    [(((1, 1),), ((2, 2), (2, 2))), ONE, TEXT, IMAGES],
]


def micro_batch(images: Images, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Returns inputs of texts around images, and labels; ``ONE`` has an image alone in a text."""
    numbers = np.random.default_rng(seed)

    def some(count: int) -> list[int]:
        count = 1 if images is ONE else count
        return [int(token) for token in numbers.integers(2, SIZES.vocabulary, count)]

    side = SIZES.patch * SIZES.merge
    texts = [
        some(3)
        + [
            part
            for high, wide in row
            for part in (
                numbers.standard_normal((high * side, wide * side)).astype("float32"),
                *some(2),
            )
        ]
        for row in images
    ]
    inputs = collate(texts, SIZES, LENGTH)
    tokens = inputs["tokens"]
    labels = paddle.concat([tokens[:, 1:], paddle.full([len(texts), 1], PAD, "int64")], 1)
    return inputs, labels


def loss_fn(logits: Any, labels: Any) -> Any:
    """Returns the cross entropy of the words."""
    labels = paddle.where(labels == IMAGE, paddle.full_like(labels, PAD), labels)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def train_plainly(plain: Any, data: list[Any], optimizer: Any) -> Any:
    """Trains on micro-batches one after another, and returns the loss; a step is left out."""
    return accumulate(loss_fn(plain(**inputs), labels) / MICRO_BATCHES for inputs, labels in data)


def different(ours: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Returns the names of tensors that differ in bits, or are there in one alone."""
    found = [bits({n: t for n, t in of.items() if t is not None}) for of in (ours, plain)]
    return [n for n in {**ours, **plain} if found[0].get(n) != found[1].get(n)]


def captured(model: Any, split_spec: Any, **options: Any) -> Any:
    """Returns a model as a pipeline, wrapped."""
    example = micro_batch(IMAGES)[0]
    options = {"verify": False, "shape_inputs": ("grids",), **options}
    pipe = fleetpipe.pipeline(model, example, loss_fn, split_spec, **options)
    return fleet.distributed_model(pipe)


def beside(*args: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the example's model as by `captured`, a plain copy of it, and an AdamW of each."""
    paddle.seed(0)
    model = QwenVL(SIZES)
    plain = copy.deepcopy(model)
    wrapped = captured(model, *args, **options)
    optimizers = (paddle.optimizer.AdamW(0.01, parameters=m.parameters()) for m in (wrapped, plain))
    return wrapped, plain, *optimizers


BEFORE = ["visual.blocks.1", "visual.merger", "layers.1"]


@pytest.mark.parametrize(
    ("split_spec", "schedule", "options"),
    [
        (["visual.blocks.2"], "1F1B", {"verify": "first"}),
        (BEFORE, "ZBV", {"num_chunks": 2}),
        (BEFORE, "Interleaved1F1B", {"num_chunks": 2, "recompute_interval": 5}),
    ],
)
def test_texts_and_images_in_any_mixture_have_the_plain_bits(
    split_spec: list[str], schedule: str, options: dict[str, Any]
) -> None:
    with job((len(split_spec) + 1) // options.get("num_chunks", 1), MICRO_BATCHES, schedule):
        wrapped, plain, ours, theirs = beside(split_spec, **options)
        pipe = wrapped.layers
        for step, mixture in enumerate(STEPS):
            data = [micro_batch(images, 10 * step + i) for i, images in enumerate(mixture)]
            loss = wrapped.forward_backward_pipeline(iter(data))
            assert float(loss) == float(train_plainly(plain, data, theirs))
            gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (pipe, plain)]
            assert different(*gradients) == []
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.clear_grad()
            assert different(pipe.state_dict(), plain.state_dict()) == []
            loss = wrapped.eval_batch(iter(data[::-1]), compute_loss=True)
            plain.eval()
            with paddle.no_grad():
                shares = [loss_fn(plain(**i), label) / MICRO_BATCHES for i, label in data[::-1]]
            plain.train()
            assert float(loss) == float(sum(shares[1:], shares[0]))


def on_each_rank() -> list[Any]:
    """Trains without and with images; returns what differs from a plain model, which has it all."""
    begin(2, MICRO_BATCHES)
    wrapped, plain, ours, theirs = beside(["visual.blocks.1"])
    ours = fleet.distributed_optimizer(ours)
    losses = []
    for step, mixture in enumerate((STEPS[2], STEPS[3])):
        data = [micro_batch(images, 10 * step + i) for i, images in enumerate(mixture)]
        loss = wrapped.train_batch(iter(data), ours)
        losses.append(float(loss) == float(train_plainly(plain, data, theirs)))
        theirs.step()
        theirs.clear_grad()
    return [losses, different(wrapped.layers.full_state_dict(), plain.state_dict())]


def test_ranks_without_the_images_capture_what_another_has(
    on_ranks: Callable[..., list[Any]],
) -> None:
    assert on_ranks(on_each_rank, 2) == [[[True, True], []]] * 2


def test_the_automatic_cut_goes_through_the_tower_where_it_is_fastest() -> None:
    model = QwenVL(SIZES)
    capturing = Capturer(model, micro_batch(IMAGES)[0], shape_inputs=("grids",))
    training = capturing(capturing.example_signature, True)
    named, _ = find_cut_points(training, capturing(capturing.example_signature, False))
    assert not training.unopened
    profile = measure_nodes(capturing, training, named)
    count = len(profile.layers)
    for stages in (2, 3):
        cuts = [(0, *cut, count) for cut in combinations(profile.cuts, stages - 1)]
        best = min(max(map(profile.stages.seconds, cut, cut[1:])) for cut in cuts)
        choice = choose(profile, named, stages)
        bounds = [0, *(border.start(training) + 1 for border in choice.borders), count]
        slowest = max(map(profile.stages.seconds, bounds, bounds[1:]))
        assert best <= slowest <= 1.15 * best
    with pytest.raises(PartitionError):
        choose(profile, named, 2, memory_cap="1KiB")


class Alone(QwenVL):
    """A layer that texts alone have behind the decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.alone = nn.Linear(sizes.vocabulary, sizes.vocabulary)

    def forward(self, tokens: Any, places: Any, patches: Any = None, grids: Any = None) -> Any:
        logits = super().forward(tokens, places, patches, grids)
        return logits if patches is not None else self.alone(logits)


def test_what_the_example_does_not_use_is_refused_where_another_stage_needs_it() -> None:
    with job(2, MICRO_BATCHES):
        wrapped = captured(Alone(SIZES), ["layers.1"])
        data = [micro_batch(images) for images in STEPS[0]]
        with pytest.raises(CaptureError, match=r"stage 1 uses 'alone.*(.|\n)*comes to stage 0"):
            wrapped.forward_backward_pipeline(iter(data))


class Sum(nn.Layer):  # type: ignore[misc]
    """Adds what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any, more: Any = None) -> Any:
        x = self.first(x)
        return self.last(x if more is None else x + more)


def test_what_the_example_has_not_is_not_measured() -> None:
    x = paddle.ones([2, 3])
    with job(2, 2):
        pipe = fleetpipe.pipeline(Sum(), (x, x), nn.MSELoss(), split_spec=["last"], verify=False)
        with pytest.raises(ConfigError, match="micro-batches like the example"):
            fleet.distributed_model(pipe).profile([[(x, x), (x, None)], [x, x]])


@pytest.mark.parametrize(
    ("shape_inputs", "error", "text"),
    [
        ("grids", ConfigError, "got: 'grids'"),
        (("patches",), ConfigError, "got: 'patches'"),
        ((), ConfigError, "visual is not opened(.|\n)*reads the numbers in a tensor"),
    ],
)
def test_sizes_are_read_from_named_inputs_alone(shape_inputs: Any, error: Any, text: str) -> None:
    example = micro_batch(IMAGES)[0]
    with pytest.raises(error, match=text):
        fleetpipe.pipeline(
            QwenVL(SIZES), example, split_spec=["visual.merger"], shape_inputs=shape_inputs
        )


def test_there_are_only_so_many_captured_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_MOST_CAPTURES", 3)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with job(2):
        pipe = fleetpipe.pipeline(layers, paddle.ones([2, 3]), split_spec=["1"], verify=False)
        wrapped = fleet.distributed_model(pipe)
        for rows in (1, 3, 4, 5, 1, 2):
            x = paddle.rand([rows, 3])
            assert np.array_equal(wrapped.predict_batch([x]), layers(x))
    assert (len(pipe.captures._captures), len(pipe.captures.capturer.first_batches)) == (3, 2)
