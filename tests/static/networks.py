"""Small static programs, their pipelines, and the stock program that these must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.static import SingleProgram, install, state_dict
from tests import pipelines
from tests.pipelines import ROWS as ROWS
from tests.pipelines import begun

FEATURES, CLASSES, MICRO_BATCHES = 6, 4, 4

#: Builds a network in the default program; returns the loss, and more that is worth fetching.
Build = Callable[[], Sequence[Any]]
#: Makes an optimizer.
Make = Callable[[], Any]


@contextmanager
def static_mode() -> Iterator[None]:
    """Static mode with a scope, programs and names of its own, and the hooks in place."""
    install()
    paddle.enable_static()
    try:
        with (
            paddle.static.scope_guard(paddle.static.Scope()),
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.utils.unique_name.guard(),
        ):
            yield
    finally:
        fleet.shutdown()
        paddle.disable_static()


def strategy_of(schedule: str = "1F1B", micro_batches: int = MICRO_BATCHES, **own: Any) -> Any:
    """A strategy for a static pipeline."""
    strategy = pipelines.strategy(micro_batches, schedule, own=own)
    strategy.pipeline = True
    return strategy


def data() -> tuple[Any, Any]:
    """Rows and labels, as `batches` has them."""
    return paddle.static.data("x", [-1, FEATURES]), paddle.static.data("y", [-1, 1], "int64")


def mlp(stages: int, hidden: int = 8, dropout: Sequence[int] = (), norm: bool = False) -> Build:
    """A stage is Linear and Tanh, perhaps BatchNorm and Dropout; the last ends in the loss."""

    def build() -> Sequence[Any]:
        with device_guard("gpu:0"):
            value, label = data()
        width = FEATURES
        for stage in range(stages):
            with device_guard(f"gpu:{stage}"):
                value = nn.functional.tanh(nn.Linear(width, hidden)(value))
                width = hidden
                if norm:
                    value = nn.BatchNorm1D(hidden)(value)
                if stage in dropout:
                    value = nn.functional.dropout(value, 0.3)
        with device_guard(f"gpu:{stages - 1}"):
            logits = nn.Linear(width, CLASSES)(value)
            return [nn.functional.cross_entropy(logits, label), logits]

    return build


def batches(steps: int, micro_batches: int = MICRO_BATCHES) -> list[dict[str, np.ndarray]]:
    """Mini-batches to feed."""
    numbers = np.random.default_rng(0)
    rows = micro_batches * ROWS
    return [
        {
            "x": numbers.standard_normal((rows, FEATURES)).astype("float32"),
            "y": numbers.integers(0, CLASSES, (rows, 1)),
        }
        for _ in range(steps)
    ]


def executor_of(loss: Any = None, strategy: Any = None, optimizer: Any = None) -> Any:
    """Minimizes the loss, if there is one, by SGD if by nothing else; runs the startup program."""
    if loss is not None:
        optimizer = optimizer or paddle.optimizer.SGD(0.1)
        fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    return exe


def pipelined(
    build: Build, make: Make, feeds: Sequence[dict[str, np.ndarray]], strategy: Any
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Trains a pipeline in one process; returns what is fetched by step, and the state."""
    with static_mode():
        paddle.seed(7)
        with begun(strategy):
            fetches = build()
            optimizer = make()
            exe = executor_of(fetches[0], strategy, optimizer)
            main = paddle.static.default_main_program()
            results = []
            for feed in feeds:
                results.append(exe.run(main, feed=feed, fetch_list=list(fetches)))
                _step_rate(optimizer)
            return results, state_dict()


def unsplit(
    build: Build, make: Make, feeds: Sequence[dict[str, np.ndarray]], micro_batches: int = 4
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Trains the whole program with stock calls; returns the loss by step, and the state."""
    with static_mode():
        paddle.seed(7)
        single = SingleProgram(build, make, micro_batches)
        return [single.step(feed)[0] for feed in feeds], single.state()


def _step_rate(optimizer: Any) -> None:
    rate = optimizer._learning_rate
    if isinstance(rate, paddle.optimizer.lr.LRScheduler):
        rate.step()


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Both states have the same names and bits."""
    assert sorted(one) == sorted(other)
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, different
