"""Two computations that take turns: their order, their own states, their errors, their times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from fleetpipe.engine.stopwatch import Stopwatch
from fleetpipe.errors import PipelineTimeout
from fleetpipe.mesh import turns
from tests.fixtures import Clock, Patch


class Register:
    """A process that has one register, which each computation has for itself."""

    def __init__(self) -> None:
        self.value = "begin"
        self.threads: list[int] = []

    def suspend(self) -> Callable[[], None]:
        value = self.value
        return lambda: setattr(self, "value", value)

    def inherited(self) -> AbstractContextManager[None]:
        return nullcontext()


def writer(register: Register, lines: list[str], name: str, exchanges: int) -> Callable[[], None]:
    """Notes what it reads, writes its own, and hands over, several times."""

    def run() -> None:
        register.threads.append(threading.get_ident())
        for number in range(exchanges + 1):
            lines.append(f"{name}{number} {register.value}")
            register.value = f"{name}{number}"
            if number < exchanges:
                turns.hand_over()

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected", "last"),
    [
        (2, 1, ["f0 begin", "s0 begin", "f1 f0", "s1 s0", "f2 f1"], "f2"),
        (0, 2, ["f0 begin", "s0 begin", "s1 s0", "s2 s1"], "f0"),
        (1, 0, ["f0 begin", "s0 begin", "f1 f0"], "f1"),
    ],
)
def test_the_order_and_the_state_of_each(
    first: int, second: int, expected: list[str], last: str
) -> None:
    register, lines = Register(), list[str]()
    pairs = turns.Turns(register, 5)
    for _ in range(2):
        register.value = "begin"
        lines.clear()
        pairs.run(*(writer(register, lines, n, k) for n, k in (("f", first), ("s", second))))
        assert lines == expected
        assert register.value == last
    assert len(set(register.threads)) == 2
    turns.hand_over()  # nobody else has a turn


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("exchanges", [0, 1])
def test_an_error_of_one_ends_the_other(failing: int, exchanges: int) -> None:
    ends: list[str] = []

    def fails() -> None:
        for _ in range(exchanges):
            turns.hand_over()
        raise KeyError("mine")

    def goes_on() -> None:
        try:
            for _ in range(9):
                turns.hand_over()
            ends.append("unharmed")
        except Exception as error:
            # As autograd does with what a layer raises in backward.
            raise OSError from error
        finally:
            ends.append("end")

    pair = [fails, goes_on] if failing == 0 else [goes_on, fails]
    pairs = turns.Turns(Register(), 5)
    with pytest.raises(KeyError, match="mine"):
        pairs.run(*pair)
    # One that has not begun does not begin.
    assert ends == ([] if (failing, exchanges) == (0, 0) else ["end"])
    pairs.run(lambda: None, lambda: None)


def test_who_never_hands_over_is_no_hang() -> None:
    held = threading.Event()
    with pytest.raises(PipelineTimeout, match=r"within 0.2 s(?s:.*)\"overlap\"\] = False"):
        turns.Turns(Register(), 0.1).run(held.wait, lambda: None)
    held.set()


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3)])
def test_times_are_those_of_the_turns(monkeypatch: Patch, first: int, second: int) -> None:
    """Each sleeps once more than it hands over; drawn side by side they fill the whole time."""
    clock = Clock(monkeypatch)
    spans: dict[str, tuple[float, float]] = {}

    def sleeper(name: str, exchanges: int) -> Any:
        def run() -> None:
            for _ in range(exchanges):
                clock.sleep(1)
                turns.hand_over()
            clock.sleep(1)

        record = lambda begin, end: spans.update({name: (begin, end)})  # noqa: E731
        return Stopwatch(run, record, time.perf_counter)

    turns.Turns(Register(), 5).run(sleeper("first", first), sleeper("second", second))
    lengths = {name: end - start for name, (start, end) in spans.items()}
    assert lengths == {"first": first + 1, "second": second + 1}
    (_, end), (start, _) = sorted(spans.values())
    assert end == start
