"""Sizes that follow from the look of a batch may be read; those that depend on numbers may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.capture.tracing import capturing
from fleetpipe.errors import CaptureError
from tests.capture.beside import images, require_bits, trained
from tests.jobs import job

functional = nn.functional
X = paddle.to_tensor(np.arange(48, dtype="float32").reshape([8, 6]) % 7 - 3)
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)

#: Code in the model's own forward: it takes what a convolution made, and the size of the inputs.
Code = Callable[[Any, Any], Any]


class Images(nn.Layer):  # type: ignore[misc]
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
            lambda: Images(code),
            [images(8, 8)[0], paddle.ones([8])],
            loss_fn=lambda output, label: (output.mean([1, 2, 3]) - label).square().mean(),
            split_spec=["second", "last"],
            steps=2,
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

    require_bits(lambda: Rows(code, Steps()), [X, LABELS], ["last"], steps=1)


def test_a_check_that_raises_an_error_is_made_in_each_batch() -> None:
    def code(self: Any, x: Any) -> Any:
        if (x.abs() > 1e6).any():
            raise ValueError("too large")
        return self.middle(x)

    line = code.__code__.co_firstlineno + 1
    with job(2):
        done = trained(lambda: Rows(code), [X, LABELS], split_spec=["last"], steps=1)
        assert done.differing == []
        with pytest.raises(CaptureError, match=rf"does not pass a check(.|\n)*sizes.py:{line}"):
            done.model.forward_backward_pipeline([X * 1e9, LABELS])


@pytest.mark.parametrize("code", [of_some_rows, scattered, a_loss_of_some, cut_by_numbers])
def test_sizes_that_nobody_reads_may_depend_on_numbers(code: Callable[[Any, Any], Any]) -> None:
    require_bits(lambda: Rows(code), [X, LABELS], ["last"], steps=2)


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

    with job(2):
        data = [paddle.concat([X[:4], -X[:4]]), LABELS]
        done = trained(lambda: Rows(code, Gate()), data, split_spec=["last"], steps=2)
    assert done.differing == []


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
