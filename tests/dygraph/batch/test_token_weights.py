"""How much parts of sequences count in a loss."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.batch.token_weights import TokenWeights
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.groups import SoleGroup
from tests.dygraph.members import on_all, threads
from tests.pipelines import job, pipeline

#: Labels of two micro-batches on two ranks; the loss counts those that are not 0.
LABELS = [[[1, 2, 0, 0], [1, 0, 0, 0]], [[3, 0, 0, 0], [0, 0, 0, 0]]]
IGNORED = nn.CrossEntropyLoss(ignore_index=0)
HALF = Fraction(1, 2)


def weights(function: Any, given: list[Fraction] | None, labels: Any = LABELS) -> list[Any]:
    """The weights of both micro-batches, by rank."""

    def of_rank(group: Any) -> list[Fraction]:
        tensors = [paddle.to_tensor(label) for label in labels[group.rank]]
        tokens = TokenWeights([function], tensors, given, group)
        return [tokens.of(0, index) for index in range(2)]

    with threads(2) as groups:
        return on_all(groups, of_rank)


def test_a_part_counts_by_its_places_of_the_micro_batch() -> None:
    # In an average over two ranks: twice the share of the places, times the micro-batch's weight.
    assert weights(IGNORED, [HALF, HALF]) == [[Fraction(2, 3), 1], [Fraction(1, 3), 0]]
    nothing = [[[0, 0], [0, 0]]] * 2
    assert weights(IGNORED, [HALF, HALF], nothing) == [[HALF, HALF]] * 2


def test_a_batch_counts_by_all_its_places() -> None:
    assert weights(IGNORED, None) == [[1, HALF], [HALF, 0]]
    nothing = [[[0, 0], [0, 0]]] * 2
    assert weights(IGNORED, None, nothing) == [[0, 0]] * 2


def test_a_sum_is_added_up() -> None:
    function = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
    assert weights(function, [HALF, HALF]) == [[1, 1]] * 2
    assert weights(function, None) == [[HALF, HALF]] * 2


def test_a_mean_over_all_places_counts_alike_and_by_tokens_as_what_it_counts() -> None:
    """Paddle 3.3 divides by all places where the ignored label is below 0, and 2.6 does not."""
    labels = [[[n or -100 for n in row] for row in rows] for rows in LABELS]
    function = nn.CrossEntropyLoss(ignore_index=-100)
    logits = paddle.rand([4, 5])
    losses = [[float(function(logits, paddle.to_tensor(r))) for r in rows] for rows in labels[:1]]
    exact = nn.functional.cross_entropy(logits, paddle.to_tensor(LABELS[0][0]), reduction="none")
    (first, _), _ = weights(function, None, labels)
    # Half of an average over two ranks is this rank's share: two of four places.
    total = float(first) / 2 * losses[0][0]
    assert abs(total - float(exact.flatten()[:2].sum()) / 4) < 1e-6


def test_labels_below_zero_need_a_function_that_says_what_it_counts() -> None:
    with pytest.raises(ConfigError, match="does not say"):
        TokenWeights([lambda x, y: x], [paddle.to_tensor([1, -100])], None, SoleGroup())


def test_tokens_weigh_the_micro_batches_of_a_pipeline() -> None:
    """In one process that plays two ranks: the mean over the counted places of the batch."""
    inputs = paddle.rand([8, 6])
    labels = paddle.to_tensor([1, 2, 3, 0, 0, 0, 1, 0])
    with job(2, 4, loss_reduction="tokens"):
        model = pipeline([nn.Linear(6, 5), nn.Linear(5, 4)], loss_fn=IGNORED)
        single = model.layers.single_model()
        loss = model.forward_backward_pipeline([inputs, labels])
        with pytest.raises(ConfigError, match="count by their tokens"):
            model.train_batch([inputs, labels], None, weights=[Fraction(1, 4)] * 4)
        grads = [parameter.grad.numpy() for parameter in model.parameters()]
        expected = nn.functional.cross_entropy(single(inputs), labels, ignore_index=0)
        expected.backward()
    assert abs(float(loss) - float(expected)) < 1e-6
    for grad, parameter in zip(grads, single.parameters()):
        assert paddle.allclose(paddle.to_tensor(grad), parameter.grad, atol=1e-6)
