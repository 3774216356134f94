"""How much micro-batches and parts of sequences count, beside plain Paddle's loss of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.batch.counted_places import places_of
from fleetpipe.dygraph.batch.units import PlaceWeights
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.groups import SoleGroup
from tests.groups import on_members, threads
from tests.pipelines import batch, job, mlp_layers, pipeline, sgd

pytestmark = pytest.mark.every_row

F: Any = nn.functional
IGNORED = nn.CrossEntropyLoss(ignore_index=0)
HALF = Fraction(1, 2)
ROWS, LENGTH, CLASSES = 2, 6, 4
CLASS_WEIGHTS = paddle.to_tensor([0.3, 1.7, 2.9, 0.1])


def logits_and(kind: str, ignored: int) -> tuple[Any, Any]:
    """The outputs [8, 6, 4] and labels of four micro-batches of two rows, unevenly ignored."""
    numbers = np.random.default_rng(4)
    output = paddle.to_tensor(
        numbers.standard_normal((4 * ROWS, LENGTH, CLASSES)).astype("float32")
    )
    shape = [4 * ROWS, LENGTH]
    if kind == "classes":
        labels = numbers.integers(0, CLASSES, shape)
        left_out = numbers.random(shape) < np.linspace(0.1, 0.8, 8)[:, None]
        labels[left_out] = ignored
        return output, paddle.to_tensor(labels)
    values = numbers.random([*shape, CLASSES]).astype("float32")
    if kind == "soft":
        values /= values.sum(-1, keepdims=True)
    if kind == "signs":
        values = np.sign(values - 0.4)
    return output, paddle.to_tensor(values)


def flat(function: Any, output: Any, label: Any) -> Any:
    """The loss as the whole of the rows and places: some losses take two dimensions alone."""
    return function(output.reshape([-1, CLASSES]), label.reshape([-1, *label.shape[2:]]))


CE, NLL = nn.CrossEntropyLoss, nn.NLLLoss
#: Losses by name: what makes them with a reduction, the kind of their labels, what is ignored.
LOSSES: dict[str, tuple[Any, str, int]] = {
    "cross entropy": (CE, "classes", 2),
    "ignored": (partial(CE, ignore_index=0), "classes", 0),
    "ignored below zero": (CE, "classes", -100),
    "weights": (partial(CE, weight=CLASS_WEIGHTS), "classes", 2),
    "weights, ignored": (partial(CE, weight=CLASS_WEIGHTS, ignore_index=1), "classes", 1),
    "weights, below zero": (partial(CE, weight=CLASS_WEIGHTS), "classes", -100),
    "smoothed": (partial(CE, label_smoothing=0.1), "classes", 2),
    "smoothed, ignored": (partial(CE, label_smoothing=0.1, ignore_index=2), "classes", 2),
    "smoothed, weights": (partial(CE, label_smoothing=0.3, weight=CLASS_WEIGHTS), "classes", 2),
    "soft": (partial(CE, soft_label=True), "soft", 0),
    "soft, weights": (partial(CE, soft_label=True, weight=CLASS_WEIGHTS), "soft", 0),
    "nll": (NLL, "classes", 2),
    "nll, weights": (partial(NLL, weight=CLASS_WEIGHTS), "classes", 1),
    "a function": (partial(partial, F.cross_entropy), "classes", 2),
    "a partial": (
        partial(partial, partial(F.cross_entropy, ignore_index=0, weight=CLASS_WEIGHTS)),
        "classes",
        0,
    ),
    "a partial of nll": (partial(partial, F.nll_loss, weight=CLASS_WEIGHTS), "classes", 1),
    **{
        kind.__name__: (kind, "values", 0)
        for kind in (
            *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.KLDivLoss, nn.SoftMarginLoss),
            *(nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.MultiLabelSoftMarginLoss),
        )
    },
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, "signs", 0),
    "BCE, weights": (partial(nn.BCEWithLogitsLoss, weight=CLASS_WEIGHTS), "values", 0),
    "huber": (partial(partial, F.smooth_l1_loss, delta=0.5), "values", 0),
    "margins": (partial(nn.MultiMarginLoss, margin=0.4), "classes", 2),
}


def of_whole(make: Any, output: Any, label: Any, ignored: int) -> float:
    """The mean over all places that count, in plain Paddle."""
    mean = make(reduction="mean")
    if isinstance(mean, CE) and mean.weight is None and ignored < 0:
        # 3.3 divides by all places.
        total = float(flat(make(reduction="sum"), output, label))
        return total / float((label != ignored).astype("int64").sum())
    return float(flat(mean, output, label))


def weights(function: Any, base: list[Fraction] | None, labels: Any) -> list[list[Fraction]]:
    """The weights of two micro-batches on two ranks, by rank."""

    def of_rank(group: Any) -> list[Fraction]:
        of_places = PlaceWeights([function], labels[group.rank], base, group)
        return [of_places.of(0, index) for index in range(2)]

    with threads(2) as groups:
        return on_members(groups, of_rank)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_weights_make_the_loss_of_the_whole(name: str, reduction: str) -> None:
    """Of tokens the mean over all places that count; of parts of sequences that of each row."""
    make, kind, ignored = LOSSES[name]
    loss, (output, label) = make(reduction=reduction), logits_and(kind, ignored)

    def total(of_places: list[Any], by_rank: list[Any]) -> float:
        """The average over two ranks of the weighted losses of their parts."""
        parts = zip(of_places, chain.from_iterable(by_rank))
        return sum(float(flat(loss, *one)) * float(weight) / 2 for one, weight in parts)

    parts = [(output[n : n + ROWS], label[n : n + ROWS]) for n in range(0, 8, ROWS)]
    labels = [y for _, y in parts]
    by_rank = weights(loss, None, [labels[:2], labels[2:]])
    if (name, reduction) != ("smoothed, ignored", "sum"):  # 3.3's mean divides by the classes too
        expected = of_whole(make, output, label, ignored)
        assert total(parts, by_rank) == pytest.approx(expected, rel=2e-5)
    base = [Fraction(1, 3), Fraction(2, 3)]
    whole = [(output[:3], label[:3]), (output[3:], label[3:])]
    ranks = [[(o[:, part], y[:, part]) for o, y in whole] for part in (slice(2), slice(2, None))]
    by_rank = weights(loss, base, [[y for _, y in of_rank] for of_rank in ranks])
    for index, one in enumerate(whole):
        # A sum is added up, so that what is averaged is half of it.
        shares = [of_rank[index : index + 1] for of_rank in by_rank]
        expected = float(flat(loss, *one)) * float(base[index])
        assert total([r[index] for r in ranks], shares) == pytest.approx(expected, rel=2e-5)


def test_nll_leaves_out_what_it_ignores() -> None:
    """Not beside Paddle: where labels are ignored, its kernel for CPUs writes past its result."""
    label = paddle.to_tensor([0, 1, -100, 1])
    for options, counted in (({}, 3), ({"ignore_index": 1}, 2), ({"weight": CLASS_WEIGHTS}, 3.7)):
        options = {"ignore_index": -100, **options}
        for loss in (NLL(**options), partial(F.nll_loss, **options)):
            places = places_of(loss, label)
            assert places.mean_over == places.counted
            assert float(places.counted) == pytest.approx(counted, abs=1e-5)


def masked(output: Any, labels: Any) -> Any:
    """A mean over the places of a mask, as Megatron has it."""
    label, mask = labels
    losses = F.cross_entropy(output, label, reduction="none").squeeze(-1)
    return (losses * mask).sum() / mask.sum()


class Other(nn.CrossEntropyLoss):
    def forward(self, output: Any, label: Any) -> Any:
        return super().forward(output, label) * 2


LABEL = paddle.to_tensor([[1, 2, 0, 0]])


@dataclass
class ByValue:
    scale: float = 1.0

    def __call__(self, output: Any, label: Any) -> Any:
        return self.scale * F.cross_entropy(output, label)


REFUSED: dict[str, tuple[Any, Any]] = {
    "a function of the script": (
        lambda output, label: F.cross_entropy(output, label, axis=-1),
        LABEL,
    ),
    "a mask": (masked, (LABEL, paddle.ones([1, 4]))),
    "a batch mean": (nn.KLDivLoss("batchmean"), LABEL),
    "a mask for Paddle's": (IGNORED, (LABEL, LABEL)),
    "a forward of its own": (Other(), LABEL),
    "a loss without a hash": (ByValue(), LABEL),
    "a positional partial": (partial(F.cross_entropy, LABEL), LABEL),
    "a loss with a count of its own": (nn.CTCLoss(), LABEL),
    "soft labels that are ignored": (CE(soft_label=True, ignore_index=0), paddle.ones([2, 4])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_does_not_say_what_it_counts_is_refused_or_allowed(name: str) -> None:
    loss, label = REFUSED[name]
    with pytest.raises(
        ConfigError, match=r"(?s)does not say.*\.counted.*'allow': \['loss:"
    ) as told:
        PlaceWeights([loss], [label], None, SoleGroup())
    entry = str(told.value).rpartition("['")[2].partition("']")[0]
    with job(allow=[entry]) as running:
        assert PlaceWeights([loss], [label], None, SoleGroup()).of(0, 0) == 1
        assert entry in running.allow.used


def test_what_a_function_declares_counts() -> None:
    declared = partial(masked)
    declared.counted = lambda labels: labels[1].sum()  # type: ignore[attr-defined]
    masks = [paddle.to_tensor([[1.0, 1.0, 1.0, 0.0]]), paddle.to_tensor([[1.0, 0.0, 0.0, 0.0]])]
    of_places = PlaceWeights([declared], [(LABEL, mask) for mask in masks], None, SoleGroup())
    assert [of_places.of(0, index) for index in range(2)] == [Fraction(3, 4), Fraction(1, 4)]


def test_a_micro_batch_without_places_counts_as_its_parts_or_not_at_all() -> None:
    nothing = [[paddle.zeros([1, 2], "int64")] * 2] * 2
    assert weights(IGNORED, [HALF, HALF], nothing) == [[HALF, HALF]] * 2
    assert weights(IGNORED, None, nothing) == [[0, 0]] * 2


def test_weights_of_micro_batches_are_fractions() -> None:
    with job(2, 4), pytest.raises(ConfigError, match=r"weights=\[0.25, 0.25, 0.25, 0.25\]"):
        pipeline().train_batch(batch(), None, weights=[0.25] * 4)


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


def trained_on_a_replica() -> list[tuple[str, list[float], float]]:
    """What a rank of two replicas reports, and how far its weights are from plain Paddle's."""
    results = []
    for sums in ("running", "tree"):
        for reduction, scale in (("tokens", "avg"), ("mean", "avg"), ("mean", "sum")):
            for name in ("ignored", "nll, weights", "MSELoss"):
                with job(1, 2, dp=2, sums=sums, loss_reduction=reduction) as running:
                    strategy = fleet.fleet._user_defined_strategy
                    strategy.gradient_scale_configs = {"scale_strategy": scale}
                    figures = beside_plain(LOSSES[name], reduction, scale, running.replica)
                    results.append((f"{name} {sums} {reduction} {scale}", *figures))
    return results


def beside_plain(
    row: tuple[Any, str, int], reduction: str, scale: str, replica: int
) -> tuple[list[float], float]:
    make, kind, ignored = row
    function = make(reduction="mean")
    paddle.seed(3)
    model = pipeline(mlp_layers(), loss_fn=function)
    single = model.layers.single_model()
    single.set_state_dict(model.layers.full_state_dict())
    x = paddle.randn([8, 6])
    _, label = logits_and(kind, ignored)
    label = label[:, 0]
    own = slice(4 * replica, 4 * replica + 4)
    data = [x[own], label[own]]
    micro = float(model.eval_batch(data, compute_loss=True))
    of_replica = float(sum(model.total_loss[0]))
    loss = float(model.train_batch(data, sgd(model)))
    outputs = single(x)
    parts = [(outputs[n : n + 2], label[n : n + 2]) for n in range(0, 8, 2)]
    if reduction == "tokens":
        expected = function(outputs, label)
    else:
        expected = sum(function(*one) for one in parts) / 4
    ((2 if scale == "sum" else 1) * expected).backward()
    apart = 0.0
    named = dict(model.layers.named_parameters())
    for name, parameter in single.named_parameters():
        stepped = parameter - 0.1 * parameter.grad
        apart = max(apart, float((named[name] - stepped).abs().max()))
    figures = [loss - float(expected), micro - float(expected)]
    if reduction == "mean":
        here = [float(function(*one)) for one in parts[2 * replica : 2 * replica + 2]]
        figures.append(of_replica - sum(here) / 2)
    return figures, apart


def test_replicas_report_and_step_by_the_loss_of_all(on_ranks: Any) -> None:
    for results in on_ranks(trained_on_a_replica, 2, timeout=120):
        assert len(results) == 18
        for case, figures, apart in results:
            assert max(map(abs, figures)) < 1e-5, (case, figures)
            assert apart < 1e-6, (case, apart)
