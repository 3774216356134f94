"""Seq1F1B: where sequences are cut, what layers keep between slices, and what slices cost."""

from __future__ import annotations

import gc
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleetpipe import fleet, parity
from fleetpipe.contrib import slices
from fleetpipe.contrib.slices import cut_sequences, slice_shares
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from fleetpipe.paddle_api.device import allocated_bytes
from fleetpipe.profiling import Link, PipelinePlan, Profile, Transfer, plan
from tests.contrib.slices import sliced
from tests.dygraph.train.test_training import check
from tests.pipelines import ROWS, bits, job, model_in_job, pipeline, sgd
from tests.transport.test_late import stand_in


def test_slices_keep_containers_and_order() -> None:
    tokens = paddle.arange(12).reshape([2, 6])
    batches = MicroBatches([(tokens, tokens + 1)], None)
    cut = cut_sequences(batches, (1, 2))
    assert cut.labels is None
    assert [first.shape for first, _ in cut.inputs] == [[2, 2], [2, 4]]
    assert (cut.inputs[1][1].numpy() == tokens.numpy()[:, 2:] + 1).all()


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


MICRO_BATCHES = 3


def wrapped(**options: Any) -> tuple[Any, Any]:
    options.setdefault("loss_fn", sliced.loss)
    pipe = pipeline(options.pop("layers", None) or sliced.layers(), **options)
    return pipe, sgd(pipe, 0.5)


@pytest.mark.once_for("3")
@pytest.mark.parametrize(("count", "length"), [(1, 6), (2, 6), (3, 7), (5, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_has_the_bits_of_the_single_model_fed_the_same_slices(
    ranks: int, count: int, length: int
) -> None:
    with job(ranks, MICRO_BATCHES, "Seq1F1B", slices=count):
        pipe, optimizer = wrapped(layers=sliced.layers(dropout=0.1))
        session = parity.begin(pipe, optimizer)
        for step in range(2):
            session.step(sliced.batch(MICRO_BATCHES * ROWS, length, step))
        assert session.report.bit_exact, session.report.verdict()
        assert tuple(pipe.peak_held.values()) == pipe.schedule.simulate().peak_activations
        assert max(pipe.peak_held.values()) == min(MICRO_BATCHES * count, ranks + count - 1)
        assert pipe._runtime.stage._saved == {}
        assert pipe._runtime.stage._units is None


@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("count", [2, 4, (1, 1, 4)])
def test_the_loss_is_that_of_whole_sequences_whatever_counts(count: Any, ignored: int) -> None:
    """Slices in which other numbers of tokens are left out, and micro-batches too."""
    inputs, labels = sliced.batch(MICRO_BATCHES * ROWS, 6)
    labels[:2, 1:] = labels[2, :5] = labels[4:, 2] = ignored
    loss_fn = nn.CrossEntropyLoss(ignore_index=ignored)

    def run(schedule: str, **options: Any) -> tuple[list[float], dict[str, Any]]:
        with job(2, MICRO_BATCHES, schedule, **options):
            pipe, optimizer = wrapped(loss_fn=loss_fn)
            if options:
                session = parity.begin(pipe, optimizer)
                loss = session.step([inputs, labels])[1]
                assert session.report.bit_exact, session.report.verdict()
            else:
                loss = pipe.train_batch([inputs, labels], optimizer)
            after = pipe.eval_batch([inputs, labels], compute_loss=True)
            state = {name: p.numpy() for name, p in pipe.layers.state_dict().items()}
            return [float(loss), float(after)], state

    (losses, state), ours = run("1F1B"), run("Seq1F1B", slices=count)
    assert ours[0] == pytest.approx(losses, rel=1e-6)
    for name, value in state.items():
        np.testing.assert_allclose(ours[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_several_losses_count_as_each_of_them_does() -> None:
    inputs, labels = sliced.batch(MICRO_BATCHES * ROWS, 5)
    labels[:, :2] = 0
    functions = [nn.CrossEntropyLoss(ignore_index=0), sliced.loss]
    found = []
    for schedule in ("1F1B", "Seq1F1B"):
        with job(2, MICRO_BATCHES, schedule):
            pipe, optimizer = wrapped(loss_fn=functions)
            session = parity.begin(pipe, optimizer)
            found.append([float(loss) for loss in session.step([inputs, labels])[1]])
            assert session.report.bit_exact, session.report.verdict()
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert abs(found[0][0] - found[0][1]) > 0.01


@pytest.mark.parametrize("slices", [0, True, 1.5, [], [2, 0], "2"])
def test_what_is_no_cut_is_refused(slices: Any) -> None:
    refused = pytest.raises(ConfigError, match=r"whole number of at least 1, or the lengths")
    with refused, job(2, 2, "Seq1F1B", slices=slices):
        wrapped()


def test_the_losses_of_micro_batches_are_sums_over_their_slices() -> None:
    with job(2, MICRO_BATCHES, "Seq1F1B", slices=2):
        pipe, optimizer = wrapped()
        data = sliced.batch(MICRO_BATCHES * ROWS, 5)
        losses = pipe.train_batch(data, optimizer, return_micro_batch_loss=True)
        assert losses.shape == [MICRO_BATCHES]
    with job(1, MICRO_BATCHES):
        pipe, optimizer = wrapped()
        whole = pipe.train_batch(data, optimizer, return_micro_batch_loss=True)
    np.testing.assert_allclose(losses.numpy(), whole.numpy(), rtol=1e-5)


class Silent(nn.Layer):
    """Says nothing of slices."""

    def forward(self, hidden: Any) -> Any:
        return hidden


class Twice(Silent):
    """Keeps two values."""

    takes_slices = True

    def forward(self, hidden: Any) -> Any:
        slices.keep(self, hidden)
        slices.keep(self, hidden)
        return hidden


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (LayerDesc(Silent), "Silent"),
        (Silent(), "Silent"),
        (paddle.cumsum, "cumsum"),
        (LayerDesc(nn.MultiHeadAttention, 8, 2), "MultiHeadAttention"),
        (SharedLayerDesc("key", nn.Linear, paddle.add, "weight", 8, 8), "add"),
    ],
)
def test_a_layer_that_does_not_say_that_it_takes_slices_is_refused(layer: Any, name: str) -> None:
    named = pytest.raises(ConfigError, match=rf"layer 1, {name}, does not say")
    with job(2, MICRO_BATCHES, "Seq1F1B"), named:
        wrapped(layers=[LayerDesc(nn.Linear, 8, 8), layer, LayerDesc(nn.Linear, 8, 8)])


def test_functions_that_see_one_place_at_a_time_need_nothing() -> None:
    functions = [F.relu, F.gelu, F.tanh, F.sigmoid, F.silu, paddle.tanh]
    ends = LayerDesc(nn.Linear, 8, 8), LayerDesc(nn.Linear, 8, 8)
    with job(2, MICRO_BATCHES, "Seq1F1B"):
        wrapped(layers=[ends[0], *functions, ends[1]])
        with pytest.raises(ConfigError, match="recompute_interval cannot"):
            wrapped(recompute_interval=1, recompute_ctx={"mp_group": None})


@pytest.mark.parametrize(("inputs", "labels"), [((6, 1), (6, 1)), ((6, 4), (6,)), ((6, 1), (6, 4))])
def test_sequences_that_cannot_be_cut_are_refused(inputs: Any, labels: Any) -> None:
    with job(2, MICRO_BATCHES, "Seq1F1B"):
        pipe, optimizer = wrapped()
        data = [paddle.zeros(inputs, "int64"), paddle.zeros(labels, "int64")]
        with pytest.raises(ConfigError, match="at least 2"):
            pipe.train_batch(data, optimizer)
        pipe.train_batch(sliced.batch(6, 4), optimizer)


def test_a_layer_keeps_one_value_in_a_slice() -> None:
    with job(2, MICRO_BATCHES, "Seq1F1B"):
        pipe, optimizer = wrapped(layers=[*sliced.layers(), LayerDesc(Twice)])
        with pytest.raises(UsageError, match="Twice keeps two values"):
            pipe.train_batch(sliced.batch(6, 4), optimizer)


class Recomputing(sliced.Attention):
    """Attention that is run again in backward."""

    def forward(self, hidden: Any) -> Any:
        attend = super().forward
        return fleet.utils.recompute(attend, hidden)


def test_a_layer_that_is_recomputed_is_refused() -> None:
    first, *rest = sliced.layers()
    with job(2, MICRO_BATCHES, "Seq1F1B"):
        pipe, optimizer = wrapped(layers=[first, LayerDesc(Recomputing), *rest])
        # Paddle raises an error of its own with the words of this one.
        with pytest.raises(Exception, match="again in a backward"):
            pipe.train_batch(sliced.batch(6, 4), optimizer)


def test_nothing_is_kept_outside_of_slices() -> None:
    layer = Silent()
    slices.keep(layer, 1)
    assert slices.earlier(layer) == []


def test_over_the_late_and_poisoned_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = stand_in(monkeypatch)
    check(sliced.MODEL, 4, "Seq1F1B")
    assert hubs


def test_slices_are_measured_one_by_one_and_nothing_stays_in_memory(tmp_path: Path) -> None:
    path, lengths, sizes = tmp_path / "costs.json", (120, 60, 30), []
    data = sliced.batch(2 * ROWS, 210)
    with job(2, 2, "Seq1F1B", slices=(4, 2, 1)):
        model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
        before = bits(model.layers.state_dict())
        for _ in range(2):
            measured = model.profile(data, path)
            gc.collect()
            sizes.append(allocated_bytes())
        assert bits(model.layers.state_dict()) == before
    # Less, where garbage of an earlier test goes meanwhile.
    assert sizes[1] <= sizes[0]
    assert Profile.read(path) == measured
    assert measured.slice_lengths == lengths
    assert [len(part) for part in measured.slices] == [7, 7, 7]
    width = 4 * sliced.WIDTH * ROWS
    for index, (part, length) in enumerate(zip(measured.slices, lengths)):
        attention = part[1]
        assert attention.forward > 0
        assert attention.backward is not None
        assert attention.backward > 0
        assert attention.output == width * length
        # The weights of all places seen, in the middle of what is held.
        seen = sum(lengths[: index + 1])
        scores = 4 * ROWS * length * seen
        assert scores < attention.held < scores + 20 * width * seen


def test_a_plan_of_slices_trains_as_the_single_model_does() -> None:
    data = sliced.batch(2 * ROWS, 24)
    with job(2, 2, "Seq1F1B", slices=2):
        model = pipeline(sliced.layers(), loss_fn=sliced.loss)
        measured = model.profile(data)
    # As if slices took no longer in all than whole sequences do: they are that short here. And as
    # if layers took equally long: where one takes far longer, other schedules fit the cap as well.
    times = {"forward": 1e-3, "backward": 2e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
    *layers, loss = (replace(layer, **times) for layer in (*measured.layers, measured.loss))
    half = [
        replace(layer, forward=5e-4, backward=1e-3, held=1, working=1) for layer in (*layers, loss)
    ]
    measured = replace(
        measured,
        layers=tuple(layers),
        loss=loss,
        links=(Link(0, 0),),
        transfer=Transfer(),
        slices=(tuple(half),) * 2,
    )
    cap = max(plan(measured, 2, 2, search=()).predicted.peak_bytes) - 1
    chosen = plan(measured, 2, 2, memory_cap=cap, search=("schedule",))
    assert (chosen.schedule.name, chosen.schedule.slices) == ("Seq1F1B", 2)
    assert PipelinePlan.loads(chosen.dumps()) == chosen
    assert chosen.schedule_for(5).slices == 2
    with model_in_job(2, 2, layers=sliced.layers(), loss_fn=sliced.loss, plan=chosen) as model:
        session = parity.begin(model, sgd(model))
        session.step(data)
        assert session.report.bit_exact, session.report.verdict()
    refused = pytest.raises(ConfigError, match=r"slices=2\n(.|\n)*slices=\(1, 2, 1\)")
    with job(2, 2, slices=(1, 2, 1)), refused:
        pipeline(sliced.layers(), loss_fn=sliced.loss, plan=chosen)
