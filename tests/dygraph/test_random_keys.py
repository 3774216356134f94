"""Dropout depends on the draw, the layer and the micro-batch: not on ranks, schedules or chunks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.random_keys import Keys, draws_nothing, hash_to_seed, under_keys
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc, get_rng_state_tracker
from fleetpipe.mesh.groups import SoleGroup
from tests import pipelines
from tests.fixtures import Patch
from tests.pipelines import (
    CLASSES,
    FEATURES,
    ROWS,
    Trained,
    batch,
    job,
    model_in_job,
    pipeline,
    sgd,
    train,
)

#: (p, v, schedule)
RUNS = [
    (1, 1, "1F1B"),
    (2, 1, "1F1B"),
    (4, 1, "1F1B"),
    (3, 1, "FThenB"),
    (4, 1, "Eager1F1B"),
    (2, 2, "Interleaved1F1B"),
    (4, 2, "Interleaved1F1B"),
    (2, 1, "ZBH1"),
    (2, 2, "ZBV"),
    (4, 2, "DualPipeV"),
]


class Noisy(nn.Layer):
    """Draws a dropout mask and a noise, with a Linear between; also from NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.inner = nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        noise = paddle.randn(x.shape) * float(np.random.rand()) * jitter()
        return self.inner(self.dropout(x)) + 0.1 * noise


def jitter() -> float:
    return random.uniform(0.5, 1.0)


def noisy_layers() -> list[Any]:
    """12 entries that draw from Paddle's generator in four ways."""
    layers: list[Any] = [LayerDesc(nn.Linear, FEATURES, 8)]
    for _ in range(3):
        layers += [LayerDesc(Noisy), LayerDesc(nn.BatchNorm1D, 8), nn.functional.dropout]
    return [*layers, LayerDesc(nn.Dropout, 0.1), LayerDesc(nn.Linear, 8, CLASSES)]


def drawing_loss(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(nn.functional.dropout(output, 0.2), label)


def trained(run: tuple[int, int, str], **configs: Any) -> tuple[Trained, list[Any]]:
    """Trains on ranks and chunks under a schedule; returns a user's own draws too."""
    ranks, chunks, schedule = run
    drawn: list[Any] = []
    np.random.seed(0)
    random.seed(0)

    def draw(model: Any) -> None:
        model.predict_batch(batch(8)[0])
        drawn.append([paddle.rand([3]).tolist(), np.random.rand(), random.random()])

    found = train(
        *(noisy_layers(), ranks, schedule),
        micro_batches=8,  # which DualPipeV needs on 4 ranks
        each_step=draw,
        gradients=True,
        configs=configs,
        num_virtual_pipeline_stages=chunks,
        loss_fn=drawing_loss,
    )
    return found, drawn


def test_one_seed_gives_the_same_bits_for_every_partition_and_schedule() -> None:
    expected = trained(RUNS[0])
    for run in RUNS[1:]:
        assert trained(run) == expected, run


def test_another_seed_and_another_step_give_other_masks() -> None:
    with job(2, 2):
        losses = []
        model = pipeline(noisy_layers())
        for seed in (1, 1, 2):
            paddle.seed(seed)
            for _ in range(2):
                losses.append(float(model.forward_backward_pipeline(batch(2))))
    assert losses[:2] == losses[2:4]
    assert len(set(losses)) == 4


def test_micro_batches_and_layers_have_masks_of_their_own() -> None:
    masks: list[bytes] = []

    def keep(x: Any) -> Any:
        masks.append((x == 0).numpy().tobytes())
        return paddle.ones_like(x) + 0 * x

    layers = [lambda x: paddle.ones([64, FEATURES]), *[nn.Dropout(0.5), keep] * 3]
    with job(1, 2):
        model = pipeline([*layers, nn.Linear(FEATURES, CLASSES)], loss_fn=lambda y, _: y.sum())
        model.forward_backward_pipeline(batch(2))
    assert len(set(masks)) == len(masks) == 6


def test_fleets_own_behaviour_can_be_asked_for() -> None:
    one, two = (trained(run, rng="fleet") for run in RUNS[:2])
    assert one[0].losses[0] != two[0].losses[0]
    assert one == trained(RUNS[0], rng="fleet")
    assert one[0].losses[0] != trained(RUNS[0])[0].losses[0]
    with pytest.raises(ConfigError, match="'keyed'"), job(2, rng="other"):
        pipeline(noisy_layers())


def test_without_keys_the_generator_goes_on_from_layer_to_layer() -> None:
    """What Fleet does in one process: a plain loop of the same layers draws the same."""
    layers = [nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)]
    with model_in_job(1, 2, rng="fleet", layers=layers) as model:
        paddle.seed(5)
        loss = model.forward_backward_pipeline(batch(2))
    paddle.seed(5)
    inputs, labels = batch(2)
    losses = []
    for k in range(2):
        rows = slice(k * ROWS, (k + 1) * ROWS)
        output = layers[1](layers[0](inputs[rows]))
        losses.append(nn.functional.cross_entropy(output, labels[rows]) / 2)
    assert float(loss) == float(losses[0] + losses[1])


def test_the_generator_is_put_back_when_a_batch_fails() -> None:
    def fail(x: Any) -> Any:
        raise KeyError("mine")

    with model_in_job(2, 2, layers=[*noisy_layers()[:4], fail]) as model:
        paddle.seed(9)
        with pytest.raises(KeyError):
            model.forward_backward_pipeline(batch(2))
        after = paddle.rand([2]).tolist()
    paddle.seed(9)
    random_keys.draw_keys("keyed")
    assert paddle.rand([2]).tolist() == after
    assert random_keys.current_keys() is None


def test_keys_are_mixed_and_fixed() -> None:
    assert hash_to_seed(0) == 8147104208329303767
    assert hash_to_seed(1, 2, 3) == 3851293329796251419
    parts = list(itertools.product(range(20), range(-1, 20), range(20)))
    # The CPU generator takes the low 32 bits.
    assert len({hash_to_seed(*part) % 2**32 for part in parts}) == len(parts)
    assert all(0 <= hash_to_seed(*part) < 2**63 for part in parts[:100])


def test_the_number_of_a_batch_is_drawn_by_the_host(monkeypatch: Patch) -> None:
    paddle.seed(5)
    expected = [int(paddle.randint(0, 2**31 - 1, [1], dtype="int64").item()) for _ in range(2)]
    paddle.seed(5)
    monkeypatch.setattr(paddle, "randint", None)  # on a GPU, .item() would wait for the card
    assert [random_keys.draw_keys("keyed")._batch_seed for _ in range(2)] == expected  # type: ignore[union-attr]


class Sliced(SoleGroup):
    """Member ``rank`` of two: both have a stream "local" of their own, and share "global"."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks = rank, 2

    def all_gather(self, value: Any) -> list[Any]:
        own_draw, seeds = value
        assert own_draw == 100 + self.rank
        return [(100 + rank, {**seeds, "local": 1 + rank}) for rank in range(2)]


def streams(rank: int, layer: int = 2, micro_batch: int = 0, name: str = "local") -> list[Any]:
    """What a layer draws outside of, within, outside of and again within a tracker's stream."""
    tracker = get_rng_state_tracker()
    keys = Keys(100 + rank)
    with under_keys(keys, Sliced(rank)):
        keys.micro_batch = micro_batch
        keys.enter(layer)
        drawn = []
        for _ in range(2):
            drawn.append(paddle.rand([2]).tolist())
            with tracker.rng_state(name):
                drawn.append(paddle.rand([2]).tolist())
        return drawn


def test_streams_of_tensor_parallelism_are_keyed_too() -> None:
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add("local", 1)
    tracker.add("global", 5)
    try:
        before = paddle.get_rng_state()
        first, second = streams(0), streams(1)
        # Outside of the stream all slices draw the same, though they began with other draws.
        assert first[::2] == second[::2]
        assert first[1::2] != second[1::2]
        everything = [*first, *second[1::2], *streams(0, 3)[1::2], *streams(0, 2, 1)[1::2]]
        common = streams(0, name="global")
        assert streams(1, name="global") == common
        everything += common[1::2]
        assert len({tuple(drawn) for drawn in everything}) == len(everything)
        assert streams(0) == first
        with pytest.raises(ValueError, match="not exist"):
            streams(0, name="unknown")
        # Outside of a batch Paddle's own states go on as if nothing had been.
        paddle.set_rng_state(before)
        with tracker.rng_state("local"):
            own = paddle.rand([2]).tolist()
        paddle.seed(1)
        assert paddle.rand([2]).tolist() == own
    finally:
        tracker.reset()


def test_what_draws_nothing_is_known_only_of_paddles_own() -> None:
    class Mine(nn.Linear):
        """Might do anything."""

    quiet = [nn.Linear(2, 2), nn.ReLU(), nn.functional.relu, paddle.flatten]
    unknown = [Mine(2, 2), nn.Dropout(), nn.RReLU(), nn.Sequential(nn.ReLU()), lambda x: x, list]
    assert all(map(draws_nothing, quiet))
    assert not any(map(draws_nothing, unknown))
    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda _layer, x: x)
    patched.forward = lambda x: x
    assert not draws_nothing(hooked)
    assert not draws_nothing(patched)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B"])
def test_parity_of_a_model_with_dropout_and_running_statistics(ranks: int, schedule: str) -> None:
    options = {"recompute_interval": ranks % 2, "recompute_ctx": {}, "loss_fn": drawing_loss}
    with model_in_job(ranks, 4, schedule, layers=noisy_layers(), **options) as model:
        session = parity.begin(model, sgd(model))
        for step in range(3):
            session.step(batch(seed=step))
        session.eval_batch(batch(seed=3), compute_loss=True)
        session.predict_batch(batch(seed=4)[0])
    assert session.report.bit_exact, session.report.verdict()


def compared(dp: int) -> tuple[bool, bool, list[float], str]:
    """Compares replicas of two stages with the single model; the verdict and the losses."""
    pipelines.begin(dp=dp, pp=2, micro_batches=2)
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    # Statistics are of each micro-batch and each replica: not to be compared here.
    layers = [entry for entry in noisy_layers() if "BatchNorm" not in repr(entry)]
    options = {"recompute_interval": 2, "recompute_ctx": {"mp_group": None}}
    model = pipeline(layers, loss_fn=drawing_loss, **options)
    paddle.seed(4)
    session = parity.begin(model, sgd(model))
    for step in range(3):
        session.step([part[replica * 2 * ROWS :][: 2 * ROWS] for part in batch(4, step)])
    report = session.report
    fleet.shutdown()
    return report.passed, report.bit_exact, report.pipeline_loss, report.verdict()


def test_ranks_and_replicas_draw_what_one_device_draws(on_ranks: Callable[..., Any]) -> None:
    for dp in (1, 2):
        ranks = on_ranks(compared, 2 * dp, dp)
        for passed, bit_exact, losses, verdict in ranks:
            assert passed, verdict
            assert bit_exact or dp == 2
            assert losses == ranks[0][2]
            assert len(set(losses)) == 3
