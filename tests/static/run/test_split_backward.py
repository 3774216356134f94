"""Static programs with recompute, and with a split backward: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.optimizer import RecomputeOptimizer
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from fleetpipe.static import ir, name_of, pipeline_of, state_dict
from fleetpipe.static.cut import split
from tests.fixtures import Call
from tests.static.networks import (
    CLASSES,
    FEATURES,
    MICRO_BATCHES,
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
from tests.static.run.test_training import PIR, compare, momentum, products, skip3, varied

WIDTH, LAYERS = 8, 6


def layer(value: Any, index: int) -> Any:
    """Linear, BatchNorm, Tanh; a dropout now and then, and what splits and joins lists."""
    value = nn.Linear(value.shape[1], WIDTH)(value)
    value = nn.functional.tanh(nn.BatchNorm1D(WIDTH)(value))
    if index % 3 == 1:
        value = nn.functional.dropout(value, 0.3)
    left, right = paddle.split(value, 2, axis=1)
    return paddle.concat([right * 2.0, left], axis=1)


def deep(checkpoints: list[Any]) -> Sequence[Any]:
    """Two stages of six layers; the second layer of each three ends in a checkpoint."""
    with device_guard("gpu:0"):
        value, label = data()
    for stage in range(2):
        with device_guard(f"gpu:{stage}"):
            for index in range(LAYERS):
                value = layer(value, index)
                if index % 3 == 1:
                    checkpoints.append(value)
    with device_guard("gpu:1"):
        logits = nn.Linear(WIDTH, CLASSES)(value)
        return [nn.functional.cross_entropy(logits, label), logits]


def without(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    return optimizer


def by_strategy(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": [name_of(value) for value in checkpoints]}
    return optimizer


def by_optimizer(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    wrapped = RecomputeOptimizer(optimizer)
    wrapped._set_checkpoints([name_of(value) for value in checkpoints])
    return wrapped


@contextmanager
def minimized(mark: Call, build: Call = deep, **own: Any) -> Iterator[Any]:
    """A network as a pipeline that was started; yields its executor and its fetches."""
    with static_mode():
        paddle.seed(7)
        strategy = strategy_of(**own)
        fleet.init(is_collective=True, strategy=strategy)
        checkpoints: list[Any] = []
        fetches = build(checkpoints)
        optimizer = mark(strategy, paddle.optimizer.Momentum(0.1, 0.9), checkpoints)
        exe = executor_of(fetches[0], strategy, optimizer)
        yield exe, fetches


def trained(mark: Call, fetch: int, **own: Any) -> tuple[list[bytes], dict[str, np.ndarray]]:
    with minimized(mark, **own) as (exe, fetches):
        found = [exe.run(feed=feed, fetch_list=fetches[:fetch]) for feed in batches(3)]
        return [value.tobytes() for values in found for value in values], state_dict()


# A backward that is split computes again what it needs, and all, in its first half.
SPLIT = [(by_strategy, "ZBH1")] if PIR else []


@pytest.mark.parametrize(
    ("mark", "schedule"), [(by_optimizer, "F-then-B"), (by_strategy, "1F1B"), *SPLIT]
)
def test_recompute_changes_no_bit(mark: Call, schedule: str) -> None:
    expected, expected_state = trained(without, 2, schedule=schedule)
    found, state = trained(mark, 2, schedule=schedule)
    assert found == expected
    assert_same(state, expected_state)
    assert len(set(found)) == len(found)


def held_bytes(exe: Any, fetches: Sequence[Any]) -> list[int]:
    """Bytes that each stage keeps of a micro-batch between its forward and its backward."""
    exe.run(feed=batches(1)[0], fetch_list=fetches)
    stage = pipeline_of()._compiled.stage
    found = dict.fromkeys(stage._runners, 0)
    release = stage.release

    def measured(number: int, micro_batch: int) -> None:
        kept, _ = stage._saved[number, micro_batch]
        tensors = [tensor for tensor in kept.values() if not isinstance(tensor, list)]
        found[number] = sum(np.array(tensor).nbytes for tensor in tensors)
        release(number, micro_batch)

    stage.release = measured
    exe.run(feed=batches(1)[0], fetch_list=fetches)
    return list(found.values())


def held(mark: Call) -> list[int]:
    with minimized(mark) as (exe, fetches):
        return held_bytes(exe, fetches)


def test_less_is_kept() -> None:
    whole, marked = held(without), held(by_strategy)
    assert all(2 * few < many for few, many in zip(marked, whole)), (marked, whole)


def test_a_value_has_the_name_that_a_script_gives_and_is_fetched_by_it() -> None:
    def named(checkpoints: list[Any]) -> Any:
        loss, logits = deep(checkpoints)
        name = name_of(logits)
        assert name_of(logits) == name != name_of(loss)
        assert name_of(paddle.static.data("z", [1])) == "z"
        return loss, name

    with minimized(without, named) as (exe, (_, name)):
        assert exe.run(feed=batches(1)[0], fetch_list=[name])[0].shape == (2 * MICRO_BATCHES, 4)


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"checkpoints": []}, "no checkpoint is named"),
        ({"checkpoints": ["nothing"]}, "no value 'nothing'"),
        ({"checkpoints": ["x"], "enable_offload": True}, "offloads nothing"),
    ],
)
def test_recompute_that_cannot_be(configs: dict[str, Any], words: str) -> None:
    def mark(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
        strategy.recompute = True
        strategy.recompute_configs = configs
        return optimizer

    with pytest.raises(ConfigError, match=words), minimized(mark):
        pass


def test_what_backward_takes_for_its_shape_is_kept_as_a_shape() -> None:
    def three_layers(checkpoints: list[Any]) -> Sequence[Any]:
        with device_guard("gpu:0"):
            value = paddle.static.data("x", [-1, FEATURES])
            for _ in range(3):
                value = nn.functional.tanh(nn.Linear(value.shape[1], WIDTH)(value))
        with device_guard("gpu:1"):
            return [paddle.mean(nn.Linear(WIDTH, 1)(value))]

    with minimized(without, three_layers) as (exe, fetches):
        # What goes into stage 0 and what comes out of its tanhs; not the products before the bias.
        assert held_bytes(exe, fetches)[0] == 4 * 2 * (FEATURES + 3 * WIDTH)


pir_only = pytest.mark.skipif(not PIR, reason="the backward of an older Program is not cut")


def convolutions() -> Any:
    """Convolutions with statistics and biases, and products, in three stages."""
    with device_guard("gpu:0"):
        x, y = data()
        image = nn.Conv2D(1, 3, 3, padding=1)(x.reshape([-1, 1, 2, FEATURES // 2]))
        image = nn.functional.relu(nn.BatchNorm2D(3)(image))
    with device_guard("gpu:1"):
        image = image + nn.Conv2D(3, 3, 3, padding=1, groups=3, bias_attr=False)(image)
    with device_guard("gpu:2"):
        logits = nn.Linear(3 * FEATURES, CLASSES)(image.flatten(1))
        loss = nn.functional.cross_entropy(logits, y)
    return [loss]


def words() -> Any:
    """An embedding, norms, attention, and one matrix that two operations of a stage take."""
    with device_guard("gpu:0"):
        x, y = data()
        hidden = nn.Embedding(CLASSES, 8)(y) + nn.Linear(FEATURES, 8)(x).unsqueeze(1)
        hidden = nn.LayerNorm(8)(hidden)
    with device_guard("gpu:1"):
        hidden = hidden + nn.MultiHeadAttention(8, 2)(hidden)
        both = nn.Linear(8, 8)
        hidden = both(nn.functional.gelu(both(hidden)))
        weight = nn.Linear(CLASSES, 8, bias_attr=False).weight
        logits = paddle.matmul(hidden, weight, transpose_y=True) + weight.sum(1)
    with device_guard("gpu:2"):
        slope = nn.PReLU()
        loss = nn.functional.cross_entropy(slope(logits).squeeze(1), y)
    return [loss]


SPLIT_NETWORKS: list[tuple[Build, str]] = [
    *((mlp(2), f"ZBH{kind}") for kind in (1, 2)),
    *((mlp(4), schedule) for schedule in ("ZBH1", "ZBV", "VHalf", "DualPipeV")),
    *((build, "ZBH1") for build in (skip3, varied, convolutions, words, products)),
    (mlp(2, norm=True, dropout=[1]), "ZBH2"),
]


@pir_only
@pytest.mark.parametrize(("build", "schedule"), SPLIT_NETWORKS)
def test_a_network_is_bit_equal(build: Build, schedule: str) -> None:
    compare(build, momentum, strategy_of(schedule))


def narrow() -> Any:
    """Products and sums in bfloat16, of parameters in float32."""
    with device_guard("gpu:0"):
        x, y = data()
        hidden = nn.Linear(FEATURES, 8)(x)
    with device_guard("gpu:1"):
        with paddle.amp.auto_cast(dtype="bfloat16"):
            hidden = nn.functional.relu(nn.Linear(8, 8)(hidden))
            logits = nn.Linear(8, CLASSES)(hidden)
        return [nn.functional.cross_entropy(logits.astype("float32"), y)]


@pir_only
def test_bfloat16_is_bit_equal() -> None:
    # Asked for one of its gradients alone, the kernel of a CPU takes the process down.
    assert pieces(narrow, 1).weight_grad.program is None
    assert pieces(narrow, 0).weight_grad.program is not None
    try:
        unsplit(narrow, momentum, batches(1))
    except RuntimeError as error:
        pytest.skip(f"plain Paddle has no such program in bfloat16 on this CPU: {error}")
    compare(narrow, momentum, strategy_of("ZBH1"))


def recurrent() -> Any:
    """An LSTM, whose backward gives the gradients of its weights as one list."""
    with device_guard("gpu:0"):
        x, y = data()
        hidden = nn.Linear(FEATURES, 8)(x).reshape([-1, 2, 4])
    with device_guard("gpu:1"):
        hidden = nn.LSTM(4, 4)(hidden)[0].flatten(1)
        return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(hidden), y)]


@pir_only
def test_an_lstm_is_bit_equal() -> None:
    feeds = batches(3)
    expected, expected_state = unsplit(recurrent, momentum, feeds)
    got, got_state = pipelined(recurrent, momentum, feeds, strategy_of("ZBH1"))
    assert [loss.tobytes() for loss in expected] == [one[0].tobytes() for one in got]
    # What a GPU would have its weights in is nobody's on a CPU.
    assert_same({name: expected_state[name] for name in got_state}, got_state)
    assert {"linear_0.w_0", "lstm_cell_0.w_0", "linear_1.b_0"} <= set(got_state)


def pieces(build: Callable[[], Any], stage: int) -> Any:
    """The pieces of a stage."""
    with static_mode():
        loss = build()[0]
        reader = ir.read(loss.block.program)
        cut = split(reader.graph)
        return reader.stage(cut, stage, reader.number(loss), 1.0).cut(cut.readers(stage), {"I"})


def results(piece: Any, name: str) -> list[list[bool]]:
    """Which results each operation of a piece is asked for."""
    ops = [op for op in piece.program.global_block().ops if op.name() == name]
    return [[value.initialized() for value in op.results()] for op in ops]


@pir_only
def test_each_half_asks_for_its_own_gradients_alone() -> None:
    found = pieces(convolutions, 1)
    assert results(found.input_grad, "pd_op.depthwise_conv2d_grad") == [[True, False]]
    assert results(found.weight_grad, "pd_op.depthwise_conv2d_grad") == [[False, True]]
    last = pieces(convolutions, 2)
    assert results(last.input_grad, "pd_op.matmul_grad") == [[True, False]]
    assert results(last.weight_grad, "pd_op.matmul_grad") == [[False, True]]
    # The gradient of a sum with a bias is that of the other operand: nothing is copied in I.
    assert results(last.input_grad, "pd_op.add_grad") == []
    assert results(last.weight_grad, "pd_op.add_grad") == [[False, True]]
    assert len([n for n in last.weight_grad.waiting if ".2.waiting." in n]) == 1
    # What cannot be divided is computed in I; in W where nothing waits for the input's gradient.
    found = pieces(convolutions, 0)
    assert results(found.input_grad, "pd_op.batch_norm_grad") == [[True, True, True]]
    assert results(found.weight_grad, "pd_op.batch_norm_grad") == []
    assert results(found.weight_grad, "pd_op.conv2d_grad") == [[False, True]]
    assert "pd_op.conv2d_grad" not in {
        op.name() for op in found.input_grad.program.global_block().ops
    }


@pytest.mark.skipif(PIR, reason="PIR is cut")
def test_an_older_program_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="does not run ZBH1"):
        pipelined(mlp(2), momentum, [], strategy_of("ZBH1"))
