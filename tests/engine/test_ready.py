"""Ranks that run what is ready: any arrival of messages, real waits, and what observers see."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleetpipe.engine import ready
from fleetpipe.engine.engine import Engine, Walker
from fleetpipe.engine.observer import Instruction, Played, Stopwatch
from fleetpipe.engine.ready import ReadyWalker
from fleetpipe.engine.stage import Values
from fleetpipe.engine.step_meter import StepMeter
from fleetpipe.errors import PeerFailed, PipelineTimeout
from fleetpipe.job.records import RunProgress
from fleetpipe.schedules import Action, Edge, Op, Recv, Schedule, build, names
from fleetpipe.schedules.envelope import Envelope, without_fusion
from fleetpipe.transport import MessageKey
from tests.engine.test_engine import Diary
from tests.fixtures import Clock, Patch
from tests.transport.helpers import join_all

FAMILIES = names()


class Sums(Diary):
    """A diary whose stages add up gradients in the order in which they come, as floats."""

    def __init__(self, edges: tuple[Edge, ...]) -> None:
        super().__init__(edges)
        self.totals: dict[tuple[str, int], float] = {}

    def _add(self, kind: str, stage: int, micro_batch: int) -> None:
        total = self.totals.get((kind, stage), 0.0)
        self.totals[kind, stage] = total * 1.1 + 1 / (3 + micro_batch)

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        self._add("state", stage, micro_batch)
        return super().forward(stage, micro_batch, inputs)

    def _back(self, kind: str, stage: int, micro_batch: int, grads: Values) -> Values:
        self._add("at once", stage, micro_batch)
        if kind == "B":
            self._add("later", stage, micro_batch)
        return super()._back(kind, stage, micro_batch, grads)

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        self._add("later", stage, micro_batch)
        super().weight_grad(stage, micro_batch)


class Network:
    """What is under way between ranks of one thread; it arrives when the test says so."""

    def __init__(self) -> None:
        self.flying: list[tuple[int, int, MessageKey, Any]] = []
        self.arrived: dict[tuple[int, int, MessageKey], Any] = {}

    def deliver(self, index: int) -> None:
        source, target, key, value = self.flying.pop(index)
        self.arrived[source, target, key] = value


class Endpoint:
    """One rank's transport in a :class:`Network`."""

    posts = False

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def post(self, peer: int, key: MessageKey) -> None:
        """Does nothing."""

    def send(self, peer: int, key: MessageKey, value: Any) -> None:
        self.network.flying.append((self.rank, peer, key, value))

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Any]:
        at = peer, self.rank, key
        return at in self.network.arrived, self.network.arrived.pop(at, None)


def walkers(
    schedule: Schedule, stage: Any, network: Network, cap: float | None = None
) -> list[ReadyWalker]:
    plan = schedule.lower()
    made = []
    for rank in range(plan.placement.ranks):
        envelope = Envelope(schedule, rank, memory_cap=cap)
        transport: Any = Endpoint(network, rank)
        made.append(
            ReadyWalker(lambda e=envelope: begun(e), plan, rank, stage, transport, lambda _: None)
        )
        made[-1].restart(0)
    return made


def begun(envelope: Envelope) -> Envelope:
    envelope.restart()
    return envelope


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank holds nothing back that it may run."""
    monkeypatch.setattr(ready, "PATIENCE", 1e-12)
    monkeypatch.setattr(ready, "PATIENCE_OF_FORWARDS", 1e-12)


def in_order(schedule: Schedule) -> Sums:
    """What stages have when a schedule has run as it stands."""
    stage, network = Sums(schedule.lower().edges), Network()
    ranks = [
        Walker(schedule.lower(), rank, stage, Endpoint(network, rank), lambda _: None)  # type: ignore[arg-type]
        for rank in range(schedule.placement.ranks)
    ]
    while not all(walker.finished for walker in ranks):
        for walker in ranks:
            while not walker.finished and walker.advance() is None:
                pass
        while network.flying:
            network.deliver(0)
    return stage


def shuffled(ranks: list[ReadyWalker], network: Network, chance: random.Random) -> int:
    """Runs a batch whose messages arrive at random; returns how many actions ran early."""
    for walker in ranks:
        walker.restart(0)
    while left := [walker for walker in ranks if not walker.finished]:
        if network.flying and chance.random() < 0.3:
            network.deliver(chance.randrange(len(network.flying)))
        chance.choice(left).advance()
    return sum(walker.early for walker in ranks)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("eager")
def test_any_arrival_leaves_the_same_sums_within_memory(name: str) -> None:
    schedule = without_fusion(build(name, ranks=3, micro_batches=5))
    wanted = in_order(schedule)
    early = 0
    for seed in range(8):
        chance, cap = random.Random(seed), seed % 3 * 2 + 8 if seed % 2 else None
        stage, network = Sums(wanted.edges), Network()
        ranks = walkers(schedule, stage, network, cap)
        for _ in range(2):  # kinds of actions whose time is not known yet do not run early
            stage.lines, stage.totals = [], {}
            early += shuffled(ranks, network, chance)
            assert stage.totals == wanted.totals
            assert sorted(stage.lines) == sorted(wanted.lines)
            assert stage.alive == set()
            for walker in ranks:
                assert walker.peak_held <= walker._envelope.cap
    assert early > 0


def threads(
    schedule: Schedule, stage_of: Callable[[int], Any], cap: float | None, timeout: float = 10
) -> list[Any]:
    """Runs a schedule on ranks that are threads joined by sockets; returns results or errors."""
    plan = schedule.lower()
    transports = join_all(plan.placement.ranks)

    def run(rank: int) -> Any:
        envelope = Envelope(schedule, rank, memory_cap=cap)
        walker = functools.partial(ReadyWalker, lambda: begun(envelope))
        engine = Engine(
            plan, stage_of(rank), {rank: transports[rank]}, timeout, (), None, walker=walker
        )
        nothing = dict.fromkeys(("REDUCE", "STEP"), lambda: None)
        try:
            engine.run(nothing)
            engine.run(nothing)
        except Exception as error:
            return error
        return engine.peak_held[rank]

    with ThreadPoolExecutor(len(transports)) as pool:
        results = [*pool.map(run, range(len(transports)))]
    for transport in transports:
        transport.close()
    return results


def test_a_rank_goes_on_where_the_fixed_order_would_wait_for_ever() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=4)
    early = threading.Event()

    class Stage(Diary):
        def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
            if (stage, micro_batch) == (0, 2):
                early.set()
            # Rank 0 waits here for the gradient of micro-batch 0, in the order of its row.
            assert stage == 0 or early.wait(10)
            return super().forward(stage, micro_batch, inputs)

    edges = schedule.lower().edges
    # What is held in the second batch, in which the gradient may be there in time.
    assert threads(schedule, lambda _: Stage(edges), cap=3) in ([3, 1], [2, 1])


def test_a_timeout_says_where_the_rank_is_and_that_other_messages_would_do() -> None:
    schedule = build("1F1B", ranks=3, micro_batches=6)

    class Stuck(Diary):
        def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
            if micro_batch == 3:
                raise KeyError("mine")
            return super().forward(stage, micro_batch, inputs)

    edges = schedule.lower().edges
    made = {0: Diary(edges), 1: Diary(edges), 2: Stuck(edges)}
    first, second, third = threads(schedule, lambda rank: made[rank], None, timeout=0.5)
    assert isinstance(third, KeyError)
    assert isinstance(second, PipelineTimeout)
    assert "rank 1, operation B1.3 (stage 1, micro-batch 3), last finished F1.4" in str(second)
    assert "waited 0.5 s for a message of rank 2" in str(second)
    assert isinstance(first, (PipelineTimeout, PeerFailed))


class Late(Endpoint):
    """A transport whose messages come one after another, each some time after it is awaited."""

    def __init__(self, clock: Clock, messages: list[tuple[int, MessageKey]]) -> None:
        super().__init__(Network(), 1)
        self.clock, self.messages = clock, deque(messages)

    def await_any(self, messages: Any, timeout: float, patience: float) -> None:
        if patience < 0.05:
            self.clock.sleep(patience)
            return
        self.clock.sleep(0.05)
        source, key = self.messages.popleft()
        self.network.arrived[source, self.rank, key] = "value"


def test_a_wait_counts_for_the_message_that_ended_it(monkeypatch: Patch) -> None:
    clock = Clock(monkeypatch)
    schedule = build("1F1B", ranks=3, micro_batches=3)
    plan = schedule.lower()
    events: list[tuple[str, float]] = []

    class Timed:
        def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
            def note(begin: float, end: float) -> None:
                events.append((str(op), round(end - begin, 6)))

            timed = isinstance(op, (Action, Recv))
            return Stopwatch(instruction, note, time.perf_counter) if timed else instruction

    class Stage(Diary):
        def _back(self, *arguments: Any) -> Values:
            clock.sleep(0.2)
            return super()._back(*arguments)

    messages = [
        (0, MessageKey("F", 0, 1, "", int(number)))
        if way == "F"
        else (2, MessageKey("B", 1, 2, "", int(number)))
        for way, number in ("F0", "F1", "B0", "F2", "B1", "B2")
    ]
    meter = StepMeter(plan, [5, 6, 7], RunProgress(), probes=False)
    envelope = Envelope(schedule, 1)
    transport: Any = Late(clock, messages)
    walker = ReadyWalker(
        lambda: begun(envelope),
        plan,
        1,
        Stage(plan.edges),
        transport,
        lambda _: None,
        [Timed(), meter],
    )
    meter.begin()
    walker.restart(0)
    while not walker.finished:
        if (blocked := walker.advance()) is not None:
            walker.wait(blocked, 1)
    assert dict(events)["RF0>1.0"] == dict(events)["RB1>2.0"] == 0.05
    assert {name: took for name, took in events if name[0] == "B"} == dict.fromkeys(
        ("B1.0", "B1.1", "B1.2"), 0.2
    )
    times = meter.take()
    assert times.wall == pytest.approx(0.6, abs=0.01)
    assert times.awaited == {5: 3, 7: 3}
