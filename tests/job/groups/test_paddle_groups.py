"""Paddle's groups from job to job, made of numbers, with rank 1 played by the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
import pytest

from fleetpipe.errors import ConfigError, PeerFailed, TransportError
from fleetpipe.job import paddle_groups
from tests.job.test_job import MemoryStore


class FullStore(MemoryStore):
    """Says of every meeting that all have come."""

    def add(self, key: str, amount: int) -> int:
        value = super().add(key, amount)
        meeting = "/group/" in key or key.endswith(("/groups/1", "/groups/going"))
        return max(value, 2) if meeting else value


class NoWatch:
    """Watches nobody."""

    def __init__(self) -> None:
        self.limits: list[tuple[float, str, tuple[int, ...]]] = []

    @contextmanager
    def limit(self, seconds: float, what: str, ranks: Any) -> Iterator[None]:
        self.limits.append((seconds, what, tuple(ranks)))
        yield

    def gone(self) -> list[int]:
        return []


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The members of each group that Paddle made."""
    groups: list[list[int]] = []

    def new_group(ranks: list[int], **_: Any) -> int:
        groups.append(ranks)
        return len(groups)

    monkeypatch.setattr(paddle.distributed, "new_group", new_group)
    monkeypatch.setattr(paddle_groups, "_kept", {})
    monkeypatch.setattr(paddle_groups, "_in_doubt", False)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    yield groups
    paddle_groups.share_store_again()


def begin(number: int, store: Any, watch: Any, *groups: list[int]) -> list[Any]:
    """Has a job make these groups; returns them."""
    paddle_groups.forget_where_in_doubt(number, store, lambda: None)
    with paddle_groups.made_for(number, store, watch, 5.0):
        return [paddle.distributed.new_group(ranks=ranks) for ranks in groups]


def test_a_job_takes_the_groups_of_earlier_ones_by_members_and_order(
    made: list[list[int]],
) -> None:
    store, watch = FullStore(), NoWatch()
    pair, alone = [0, 1], [1]
    assert begin(0, store, watch, pair, alone, pair) == [1, 2, 3]
    paddle_groups.trust(True)
    assert begin(1, store, watch, pair, pair, [1, 0], alone) == [1, 3, 4, 2]
    assert made == [pair, alone, pair, [1, 0]]
    what = "making Paddle's group of ranks [0, 1]"
    assert (5.0, what, (0, 1)) in watch.limits


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_groups_that_some_rank_doubts_are_made_anew(whose: str, made: list[list[int]]) -> None:
    store, watch = FullStore(), NoWatch()
    begin(0, store, watch, [0, 1])
    paddle_groups.trust(whose != "own")
    if whose == "another's":
        store.add("fleetpipe/1/groups/in_doubt", 1)
    assert begin(1, store, watch, [0, 1]) == [2]
    # This job has not ended well either.
    assert begin(2, store, watch, [0, 1]) == [3]


def test_what_gloo_says_is_told_as_what_it_means() -> None:
    text = "[/paddle/third_party/gloo/transport/tcp/pair.cc:784] Connection refused"
    no_nccl = (
        "(PreconditionNotMet) The third-party dynamic library (libnccl.so) that Paddle depends on "
        "is not configured correctly. (error code is libnccl.so: cannot open shared object file)\n"
        "  - Windows: set PATH by `set PATH=XXX; (at /paddle/paddle/phi/dynamic_loader.cc:312)"
    )
    store, watch = FullStore(), NoWatch()
    for raised, kind in (
        (RuntimeError(text), PeerFailed),
        (ValueError(f"\n\n{text}"), PeerFailed),
        (RuntimeError(no_nccl), TransportError),
        (ValueError("a strategy is no number"), ValueError),
        (ConfigError("/paddle/ is no folder"), ConfigError),
    ):
        making: Any = paddle_groups.made_for(0, store, watch, 5.0)  # type: ignore[arg-type]
        with pytest.raises(kind) as told, making:
            raise raised
        assert (kind in (PeerFailed, TransportError)) == (told.value is not raised)
        cannot = "cannot load libnccl.so, by which GPUs send: cannot open shared object file"
        assert (cannot in str(told.value)) == (kind is TransportError)
        assert (f"got: {text}" in str(told.value)) == (kind is PeerFailed)
