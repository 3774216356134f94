"""Seq1F1B: sequences in slices, with what layers keep from one to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.contrib import slices
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.contrib.slices import sliced
from tests.dygraph.train.test_schedules import check
from tests.pipelines import ROWS, job, pipeline, sgd
from tests.transport.late import stand_in

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
        assert pipe._runtime.stage._kept == {}
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


def test_the_search_may_cut_sequences_of_a_model_that_takes_slices() -> None:
    options = {"slices": 4, "costs": {"forward": 1, "backward": 2, "input_grad": 2, "comm": 0}}
    with job(3, 2, "auto", memory_cap=2, **options):
        pipe, optimizer = wrapped()
        assert pipe.schedule.slices == 4
        session = parity.begin(pipe, optimizer)
        session.step(sliced.batch(2 * ROWS, 8))
        assert session.report.bit_exact, session.report.verdict()
    with job(3, 2, "auto", slices=(5, 4), costs=options["costs"]):
        assert wrapped()[0].slicing == (5, 4)
    refused = pytest.raises(ConfigError, match="layer 1, Silent, does not say")
    # Whatever is chosen for this batch.
    with job(2, 64, "auto", slices=2), refused:
        wrapped(layers=[LayerDesc(nn.Linear, 8, 8), LayerDesc(Silent), LayerDesc(nn.Linear, 8, 8)])


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
    functional = nn.functional
    functions = [functional.relu, functional.gelu, functional.tanh, functional.sigmoid]
    with job(2, MICRO_BATCHES, "Seq1F1B"):
        layers = [LayerDesc(nn.Linear, 8, 8), *functions, functional.silu, paddle.tanh]
        pipe, _ = wrapped(layers=[*layers, LayerDesc(nn.Linear, 8, 8)])
        assert len(pipe.layers.layers) == 8


def test_what_cannot_be_had_with_slices_is_refused() -> None:
    refused = pytest.raises(ConfigError, match="recompute_interval cannot")
    with job(2, MICRO_BATCHES, "Seq1F1B"), refused:
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
