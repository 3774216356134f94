"""``RecomputeStore``: spans run while a rank waits, and change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.observe.early_recompute import EarlyRecompute
from fleetpipe.engine.observer import Blocked
from fleetpipe.fleet import meta_parallel
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.meta_parallel import RecomputeStore
from fleetpipe.schedules import Edge, Recv
from fleetpipe.transport import MessageKey
from tests.pipelines import CLASSES, FEATURES, train

#: 2.6.2 has no such module.
zero_bubble_utils: Any = getattr(meta_parallel, "zero_bubble_utils", None)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    RecomputeStore.enabled = False
    RecomputeStore.clear()


class Span:
    """A dropped activation."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.result = value, None
        self.runs = 0

    def run_recompute_now(self) -> None:
        self.runs += 1
        self.result = None if self.value is None else paddle.tanh(self.value)


def test_a_waiting_rank_runs_the_spans_that_it_needs_next() -> None:
    spans = [Span() for _ in range(4)]
    for span, key in zip(spans, [(0, 1), (0, 1), (0, 1), (0, 2)]):
        RecomputeStore.key = key
        RecomputeStore.put(span)
    missing = Blocked(1, MessageKey("B", 0, 1, "", 1))
    answers = iter([missing, missing, None])
    played: Any = None
    receive = EarlyRecompute().wrap(played, Recv("B", Edge(0, 1), 1), lambda: next(answers))
    assert receive() is None
    assert [span.runs for span in spans] == [1, 1, 0, 0]
    assert RecomputeStore.pending() == spans[2:]
    answers = iter([missing, missing])
    assert receive() == missing
    assert RecomputeStore.groups == {(0, 2): [spans[3]]}


class Dropped(paddle.autograd.PyLayer):  # type: ignore[misc]
    """A tanh that keeps no output."""

    keys: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        ctx.span = Span(value)
        if RecomputeStore.enabled:
            Dropped.keys.append(RecomputeStore.key)
            RecomputeStore.put(ctx.span)
        return paddle.tanh(value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if not ctx.span.runs:
            ctx.span.run_recompute_now()
            RecomputeStore.drop(ctx.span)
        return grad * (1 - ctx.span.result * ctx.span.result)


def layers() -> list[Any]:
    linear = getattr(zero_bubble_utils, "SplitBWLinear", nn.Linear)
    widths = [FEATURES, 8, 8, CLASSES]
    entries: list[Any] = []
    for width, following in zip(widths, widths[1:]):
        entries += [LayerDesc(linear, width, following), Dropped.apply]
    return entries[:-1]


def test_neither_store_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(zero_bubble_utils, "RecomputeStore", RecomputeStore) is RecomputeStore
    plain = train(layers(), gradients=True)
    RecomputeStore.enabled = True
    store = getattr(zero_bubble_utils, "WeightGradStore", None)
    if store is not None:  # 2.6.2 has none
        monkeypatch.setattr(store, "enabled", True)
    assert train(layers(), gradients=True) == plain
    assert RecomputeStore.groups == {}
    assert {key[0] for key in Dropped.keys} == {0, 1}
    assert {key[1] for key in Dropped.keys} == {0, 1, 2, 3}
