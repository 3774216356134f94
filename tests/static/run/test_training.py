"""A static pipeline has the bits of the unsplit program, and a trace of its actions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.schedules import build
from tests.engine.test_observer import actions
from tests.fixtures import LogCapture
from tests.pipelines import begun
from tests.static.networks import (
    CLASSES,
    FEATURES,
    Build,
    assert_same,
    batches,
    data,
    executor_of,
    mlp,
    pipelined,
    static_mode,
    strategy_of,
    unsplit,
)
from tests.transport.test_late import stand_in

PIR = is_pir(paddle.static.Program())


def momentum(rate: Any = 0.1, **more: Any) -> Any:
    return paddle.optimizer.Momentum(rate, 0.9, **more)


def compare(build: Build, make: Any, strategy: Any, micro_batches: int = 4, steps: int = 3) -> None:
    """Trains both and compares every bit."""
    feeds = batches(steps, micro_batches)
    expected, expected_state = unsplit(build, make, feeds, micro_batches)
    got, got_state = pipelined(build, make, feeds, strategy)
    assert [loss.tobytes() for loss in expected] == [one[0].tobytes() for one in got]
    assert_same(expected_state, got_state)
    assert len({loss.tobytes() for loss in expected}) == steps


@pytest.mark.parametrize("micro_batches", [1, 3, 5, 6])
def test_any_number_of_micro_batches_is_bit_equal(micro_batches: int) -> None:
    compare(mlp(2), momentum, strategy_of("1F1B", micro_batches), micro_batches)


def decayed() -> Any:
    return momentum(paddle.optimizer.lr.StepDecay(0.1, 1, 0.5), weight_decay=1e-2)


def clipped() -> Any:
    return momentum(grad_clip=nn.ClipGradByGlobalNorm(0.1))


def attributed() -> Any:
    """A weight with a rate, a decay and no clip of its own."""
    with device_guard("gpu:0"):
        x, y = data()
        attr = paddle.ParamAttr(
            learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.1), need_clip=False
        )
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8, weight_attr=attr)(x))
    with device_guard("gpu:1"):
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden), y)]


@pytest.mark.parametrize(
    ("build", "make"),
    [
        *((mlp(2), partial(getattr(paddle.optimizer, kind), 0.05)) for kind in ("SGD", "Adam")),
        (mlp(2), partial(paddle.optimizer.AdamW, 0.05)),
        (mlp(2), decayed),
        (attributed, clipped),
    ],
)
def test_every_optimizer_is_bit_equal(build: Build, make: Any) -> None:
    compare(build, make, strategy_of())


def products() -> Any:
    """An einsum of one, of two, and of three operands, and one that sums over an axis."""
    with device_guard("gpu:0"):
        x, y = data()
        weight = nn.Linear(FEATURES, 8, bias_attr=False).weight
        hidden = nn.functional.tanh(paddle.einsum("bf,fh->bh", x, weight))
    with device_guard("gpu:1"):
        weights = [nn.Linear(8, 8, bias_attr=False).weight for _ in range(2)]
        hidden = hidden + paddle.einsum("bh,hi,ij->bj", hidden, *weights)
        scale = nn.Linear(8, 1, bias_attr=False).weight
        hidden = paddle.einsum("hb->bh", paddle.einsum("bh,hi->hb", hidden, scale))
        logits = nn.Linear(8, CLASSES)(hidden)
        return [nn.functional.cross_entropy(logits, y)]


def skip3() -> Any:
    """Values of stage 0 are used by stages 0, 1 and 2; an outgoing one is used inside, too."""
    with device_guard("gpu:0"):
        x, y = data()
        first = nn.functional.tanh(nn.Linear(FEATURES, 8)(x))
        second = nn.functional.relu(nn.Linear(8, 8)(first)) + first
    with device_guard("gpu:1"):
        third = nn.functional.tanh(nn.Linear(8, 8)(second)) * first
    with device_guard("gpu:2"):
        fourth = nn.functional.tanh(nn.Linear(8, 8)(third)) + second * first
        logits = nn.Linear(8, CLASSES)(fourth)
        return [nn.functional.cross_entropy(logits, y)]


def unnamed() -> Any:
    """A variable without a name, in a stage that adds gradients up, of another shape."""
    with device_guard("gpu:0"):
        x, y = data()
        block = paddle.static.default_main_program().current_block()
        doubled = block.create_var(dtype="float32", shape=[-1, FEATURES])
        options = {"scale": 2.0, "bias": 0.0, "bias_after_scale": True}
        block.append_op(type="scale", inputs={"X": [x]}, outputs={"Out": [doubled]}, attrs=options)
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(doubled))
        first = hidden + nn.functional.relu(hidden)
    with device_guard("gpu:1"):
        second = nn.functional.tanh(nn.Linear(8, 8)(first)) * hidden
    with device_guard("gpu:2"):
        logits = nn.Linear(8, CLASSES)(second + first * hidden)
        return [nn.functional.cross_entropy(logits, y)]


def test_the_sum_of_the_losses_trains_as_a_larger_rate_does() -> None:
    def plain(rate: float) -> Any:
        return lambda: paddle.optimizer.SGD(rate)

    _, summed = pipelined(mlp(2), plain(0.1), batches(3), strategy_of(loss_reduction="sum"))
    _, meant = pipelined(mlp(2), plain(0.4), batches(3), strategy_of())
    for name, value in summed.items():
        np.testing.assert_allclose(value, meant[name], rtol=1e-5, atol=1e-7)


def tied() -> Any:
    """One layer in two stages."""
    with device_guard("gpu:0"):
        x, y = data()
        both = nn.Linear(8, 8)
        hidden = both(nn.functional.tanh(nn.Linear(FEATURES, 8)(x)))
    with device_guard("gpu:1"):
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(both(hidden)), y)]


def test_a_parameter_of_two_stages_differs_by_the_order_of_a_sum_only() -> None:
    _, expected = unsplit(tied, momentum, batches(3))
    _, got = pipelined(tied, momentum, batches(3), strategy_of())
    assert sorted(got) == sorted(expected)
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=2e-7)


def varied() -> Any:
    """Lists of tensors, attention, unguarded operations, a label used twice, and a metric."""
    with device_guard("gpu:0"):
        x, y = data()
        code = nn.Embedding(CLASSES, 8)(y).reshape([-1, 8])
        left, right = paddle.split(nn.Linear(FEATURES, 8)(x), 2, axis=1)
    swapped = paddle.concat([right, left], axis=1)
    with device_guard("gpu:1"):
        normal = nn.LayerNorm(8)(swapped + code)
        told = nn.MultiHeadAttention(8, 2)(normal.reshape([-1, 1, 8])).reshape([-1, 8])
        told = nn.functional.dropout(told, 0.5)
    with device_guard("gpu:2"):
        last = nn.functional.gelu(nn.Linear(8, 8)(told))
        logits = nn.Linear(8, CLASSES)(paddle.concat([last, normal], axis=1)[:, 2:10])
        accuracy = paddle.static.accuracy(nn.functional.softmax(logits), y)
        return [nn.functional.cross_entropy(logits, y), accuracy]


def choosing() -> Any:
    """Control flow within a stage, without a gradient."""
    with device_guard("gpu:0"):
        x, y = data()
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(x))
    with device_guard("gpu:1"):
        fixed = hidden.detach()
        more = paddle.static.nn.cond(
            paddle.mean(fixed) > 0.0, lambda: fixed * 2.0, lambda: fixed * 3.0
        )
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden + more), y)]


def looping() -> Any:
    """What a loop ends with goes to the next stage, and its backward takes it, too."""
    with device_guard("gpu:0"):
        x, y = data()
        count, total = paddle.zeros([1], "int64"), paddle.mean(x).reshape([1])
        _, total = paddle.static.nn.while_loop(
            lambda count, total: count < 3,
            lambda count, total: [count + 1, total + 1.0],
            [count, total],
        )
        total.stop_gradient = True
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(x)) * total
    with device_guard("gpu:1"):
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden) * total, y)]


def everywhere() -> Any:
    """Stages compute what stands under gpu:all each for itself, from what all are fed."""
    with device_guard("gpu:all"):
        x = paddle.static.data("x", [-1, FEATURES])
        sign = paddle.sum(x, axis=1, keepdim=True) * 2.0
        sign = sign + paddle.to_tensor(np.arange(8, dtype="float32"))
    with device_guard("gpu:0"):
        y = paddle.static.data("y", [-1, 1], "int64")
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(x)) * sign
    with device_guard("gpu:1"):
        hidden = nn.functional.tanh(nn.Linear(8, 8)(hidden)) * sign
    with device_guard("gpu:2"):
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden), y)]


def numbered() -> Any:
    """Numbers of the script, made in one stage and used in others."""
    with device_guard("gpu:0"):
        x, y = data()
        given = paddle.to_tensor(np.arange(8, dtype="float32"))
        assigned = paddle.assign(np.full([8], 0.5, "float32"))
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(x)) * given
    with device_guard("gpu:1"):
        hidden = nn.functional.tanh(nn.Linear(8, 8)(hidden) * given) * assigned
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden), y)]


def noisy() -> Any:
    """Numbers that are drawn from nothing, which backward must not draw anew."""
    with device_guard("gpu:0"):
        x, y = data()
        hidden = nn.functional.tanh(nn.Linear(FEATURES, 8)(x))
    with device_guard("gpu:1"):
        drawn = nn.functional.tanh(nn.Linear(8, 8)(hidden)) * paddle.randn([8])
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(drawn), y)]


NETWORKS: list[tuple[Build, str]] = [
    *((mlp(stages), schedule) for stages, schedule in ((2, "1F1B"), (3, "F-then-B"), (4, "1F1B"))),
    *((mlp(stages), "Interleaved1F1B") for stages in (4, 6)),
    (mlp(2, norm=True, dropout=[1]), "1F1B"),
    *((build, "1F1B") for build in (products, varied, choosing, looping, numbered, noisy)),
    # A variable of the older Program; that of PIR has none.
    *([] if PIR else [(unnamed, "1F1B")]),
    *((build, schedule) for build in (skip3, everywhere) for schedule in ("F-then-B", "1F1B")),
]


@pytest.mark.parametrize(("build", "schedule"), NETWORKS)
def test_a_network_is_bit_equal(build: Build, schedule: str) -> None:
    compare(build, momentum, strategy_of(schedule))


def test_dropout_in_several_stages_does_not_depend_on_the_schedule() -> None:
    network = mlp(4, dropout=[0, 1, 3])
    results = [
        pipelined(network, momentum, batches(3), strategy_of(schedule))
        for schedule in ("F-then-B", "1F1B", "Interleaved1F1B")
    ]
    first, *others = results
    for losses, state in others:
        assert [one[0].tobytes() for one in losses] == [one[0].tobytes() for one in first[0]]
        assert_same(state, first[1])


def test_each_call_of_seed_begins_the_streams_of_all_stages_again() -> None:
    def build() -> Any:
        with device_guard("gpu:0"):
            ones = paddle.ones_like(paddle.static.data("x", [-1, FEATURES]))
            first = nn.functional.dropout(ones, 0.5)
        with device_guard("gpu:1"):
            second = nn.functional.dropout(ones, 0.5)
            return [paddle.mean(nn.Linear(FEATURES, 1)(first + second)), first, second]

    with static_mode(), begun(strategy_of()):
        fetches = build()
        exe = executor_of(fetches[0], strategy_of(), paddle.optimizer.SGD(0.0))
        masks = []
        for seed in (33, 33, None, 34):
            if seed is not None:
                paddle.seed(seed)
            masks.append(exe.run(feed={"x": batches(1)[0]["x"]}, fetch_list=fetches[1:]))
    for stage in (0, 1):
        assert np.array_equal(masks[0][stage], masks[1][stage])
        assert not np.array_equal(masks[1][stage], masks[2][stage])
        assert not np.array_equal(masks[0][stage], masks[3][stage])


def test_a_trace_has_the_actions_of_the_schedule(tmp_path: Path, caplog: LogCapture) -> None:
    with static_mode():
        strategy = strategy_of(trace=str(tmp_path / "new"))
        fleet.init(is_collective=True, strategy=strategy)
        loss = mlp(2)()[0]
        exe = executor_of(loss, strategy)
        for feed in batches(2):
            exe.run(feed=feed, fetch_list=[loss])
    assert "trace of 2 of 2 steps" in caplog.text
    document = json.loads((tmp_path / "new" / "trace.json").read_text())
    rows = build("1F1B", ranks=2, micro_batches=4).actions
    assert actions(document, 2) == [[str(action) for action in row] * 2 for row in rows]


@pytest.mark.once
@pytest.mark.parametrize("schedule", ["F-then-B", "1F1B", *(["ZBH1"] if PIR else [])])
def test_over_the_late_and_poisoned_transport(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubs = stand_in(monkeypatch)
    compare(mlp(3, norm=True), momentum, strategy_of(schedule))
    assert hubs
