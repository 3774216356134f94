"""Where sequences are cut, and what each slice counts in the loss."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle import nn
from paddle.nn import functional as F

from fleetpipe.contrib.slices.lengths import bounds, cut_sequences
from fleetpipe.contrib.slices.shares import slice_shares
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.errors import ConfigError


@given(st.integers(1, 40), st.integers(1, 9))
def test_an_equal_cut(length: int, slices: int) -> None:
    if length < slices:
        return
    cut = bounds(length, slices)
    sizes = [end - begin for begin, end in cut]
    assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])]
    assert cut[-1][1] == length
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 60), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_lengths_in_proportion(length: int, lengths: list[int]) -> None:
    if length < len(lengths):
        return
    cut = bounds(length, tuple(lengths))
    assert [begin for begin, _ in cut] == [0, *(end for _, end in cut[:-1])]
    assert cut[-1][1] == length
    assert all(end > begin for begin, end in cut)


def test_lengths_that_add_up_are_kept() -> None:
    assert bounds(12, (5, 4, 1, 2)) == [(0, 5), (5, 9), (9, 10), (10, 12)]
    assert bounds(24, (5, 4, 1, 2)) == [(0, 10), (10, 18), (18, 20), (20, 24)]
    # No slice is empty, however short it is to be.
    assert bounds(4, (97, 1, 1, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_slices_keep_containers_and_order() -> None:
    tokens = paddle.arange(12).reshape([2, 6])
    batches = MicroBatches([(tokens, tokens + 1)], None)
    cut = cut_sequences(batches, (1, 2))
    assert cut.labels is None
    assert [first.shape for first, _ in cut.inputs] == [[2, 2], [2, 4]]
    assert (cut.inputs[1][1].numpy() == tokens.numpy()[:, 2:] + 1).all()


class Padded(nn.Layer):
    """A mean over the places that are not 0, and what it says of itself."""

    def counted(self, labels: Any) -> Any:
        return (labels != 0).sum()

    def forward(self, logits: Any, labels: Any) -> Any:
        mask = (labels != 0).astype("float32")[..., 0]
        return (F.cross_entropy(logits, labels, reduction="none")[..., 0] * mask).sum() / mask.sum()


WEIGHT = paddle.to_tensor([0.5, 1.0, 2.25, 4.0])


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.CrossEntropyLoss(ignore_index=0), 0),
        (nn.CrossEntropyLoss(ignore_index=-100, weight=WEIGHT), -100),
        (nn.CrossEntropyLoss(reduction="sum"), -100),
        (nn.CrossEntropyLoss(reduction="sum", weight=WEIGHT), -100),
        (Padded(), 0),
    ],
)
@pytest.mark.parametrize("slicing", [2, 3, (1, 4)])
def test_the_shares_make_the_loss_of_the_whole(loss: Any, ignored: int, slicing: Any) -> None:
    numbers = np.random.default_rng(3)
    logits = paddle.to_tensor(numbers.standard_normal((2, 7, 4)).astype("float32"))
    labels = numbers.integers(1, 4, (2, 7))
    labels[0, :4] = labels[1, 6] = ignored
    labels = paddle.to_tensor(labels)
    if isinstance(loss, Padded):
        labels = labels.unsqueeze(-1)
    batches = MicroBatches([logits], [labels])
    (shares,) = slice_shares([loss], batches, slicing)
    cut = cut_sequences(batches, slicing)
    losses = [float(loss(*one)) * float(share) for *one, share in zip(*cut, shares)]
    assert sum(losses) == pytest.approx(float(loss(logits, labels)), rel=1e-6)


def test_where_nothing_is_counted_slices_count_by_their_lengths() -> None:
    labels = [paddle.full([2, 5], 3, "int64"), paddle.to_tensor([[1, 1, 3, 3, 3]])]
    loss = nn.CrossEntropyLoss(ignore_index=3)
    (shares,) = slice_shares([loss], MicroBatches(None, labels), 2)
    assert shares == [Fraction(3, 5), Fraction(2, 5), Fraction(1), Fraction(0)]


def test_a_loss_that_does_not_say_what_it_counts_is_refused() -> None:
    def mean(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits, labels)

    labels = [paddle.to_tensor([[1, 2, -100, 0]])]
    with pytest.raises(ConfigError, match=r"loss\.counted, where loss is this mean"):
        slice_shares([mean], MicroBatches(None, labels), 2)
    mean.counted = lambda label: (label != -100).sum()  # type: ignore[attr-defined]
    (shares,) = slice_shares([mean], MicroBatches(None, labels), 2)
    assert shares == [Fraction(2, 3), Fraction(1, 3)]
    # Numbers that are no classes may be below 0, and each function has its own shares.
    batches = MicroBatches(None, [paddle.to_tensor([[-1.0, 2.0, 3.0]])])
    assert slice_shares([nn.MSELoss(), nn.MSELoss(reduction="sum")], batches, 2) == [
        [Fraction(2, 3), Fraction(1, 3)],
        [Fraction(1), Fraction(1)],
    ]
