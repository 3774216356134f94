"""A job from its start to its end: ranks meet, agree, stop after one step, and part.

Its ranks are played by threads, over a store in memory.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe.errors import ConfigError, PeerFailed, PipelineTimeout, StateError, TransportError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job
from fleetpipe.job.meeting import facts, require_agreement
from fleetpipe.job.watch import Watch
from fleetpipe.launch.resume import Stopping
from fleetpipe.mesh.axes import Degrees
from fleetpipe.mesh.groups import DirectGroup, SoleGroup
from fleetpipe.transport import MemoryHub, MemoryTransport, MessageKey
from tests.fixtures import Patch
from tests.job.test_watch import sockets_of, soon, vanish
from tests.transport.helpers import free_port


class MemoryStore:
    """What Paddle's store does, for threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.counts[key] += amount
            return self.counts[key]


def play(
    monkeypatch: Patch, ranks: int, act: Callable[[int], Any], only: tuple[int, ...] | None = None
) -> dict[int, Any]:
    """Runs ``act(rank)`` on a thread for each rank; returns what each returned or raised."""
    local = threading.local()
    monkeypatch.setattr(meeting, "own_rank", lambda: local.rank)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(ranks))
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        local.rank = rank
        try:
            results[rank] = act(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (only or tuple(range(ranks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_those_that_came_name_those_that_did_not(monkeypatch: Patch) -> None:
    store = MemoryStore()

    def act(rank: int) -> None:
        # One whose limit is far gives up with the first, too.
        meeting.meet(store, "here", 0.2 if rank else 60)

    raised = play(monkeypatch, 4, act, only=(0, 2))
    assert raised.keys() == {0, 2}
    for error in raised.values():
        assert isinstance(error, PipelineTimeout)
        assert str(error).startswith("ranks [1, 3] did not call fleet.init within")


def test_nobody_waits_for_a_rank_that_has_ended(monkeypatch: Patch) -> None:
    store = MemoryStore()
    raised = play(
        monkeypatch,
        3,
        lambda _: meeting.meet(store, "there", 60.0, "the check", lambda: [1]),
        only=(0, 2),
    )
    for rank in (0, 2):
        assert isinstance(raised[rank], PeerFailed)
        assert str(raised[rank]).startswith("rank 1 ended and did not come to the check\n")


def test_a_rank_that_came_may_end(monkeypatch: Patch) -> None:
    store = MemoryStore()
    ended: list[int] = []

    def act(rank: int) -> None:
        time.sleep(0.05 * rank)
        meeting.meet(store, "there", 60.0, "the check", lambda: ended)
        ended.append(rank)

    assert play(monkeypatch, 3, act) == {0: None, 1: None, 2: None}


class FailedStore(MemoryStore):
    """As a ``JobStore`` that knows of a failed rank: raises where an answer is still zero."""

    def add(self, key: str, amount: int) -> int:
        value = super().add(key, amount)
        if value == 0:
            raise PeerFailed("rank 1 raised")
        return value


def test_a_failure_ends_the_wait(monkeypatch: Patch) -> None:
    store = FailedStore()
    raised = play(monkeypatch, 2, lambda _: meeting.meet(store, "there", 60.0, "it"), only=(0,))
    assert str(raised[0]) == "rank 1 raised"


def test_a_rank_that_came_may_fail_afterwards(monkeypatch: Patch) -> None:
    store = FailedStore()
    store.add("there/1", 1)
    found = play(monkeypatch, 2, lambda _: meeting.meet(store, "there", 60.0, "it"), only=(0,))
    assert found == {0: None}


@pytest.mark.parametrize("asked", ["there/1", "there/late"])
def test_a_rank_may_come_and_fail_while_it_is_asked_for(monkeypatch: Patch, asked: str) -> None:
    class Slow(MemoryStore):
        """Answers from before rank 1 came; when the answer is here, rank 1 came and failed."""

        def add(self, key: str, amount: int) -> int:
            if key == asked and not self.counts["there/1"]:
                super().add("there/1", 1)
                raise PeerFailed("rank 1 raised")
            return super().add(key, amount)

    store = Slow()
    found = play(monkeypatch, 2, lambda _: meeting.meet(store, "there", 60.0, "it"), only=(0,))
    assert found == {0: None}


def test_rank_0_stays_until_the_others_have_gone(monkeypatch: Patch) -> None:
    store, rank_1_has_gone = MemoryStore(), threading.Event()

    def act(rank: int) -> tuple[float, float]:
        if rank == 2:
            assert rank_1_has_gone.wait(15)
        came = time.monotonic()
        meeting.wait_for_store_users(store, "end")
        if rank == 1:
            rank_1_has_gone.set()
        return came, time.monotonic()

    moments = play(monkeypatch, 3, act)
    assert moments[0][1] >= moments[2][0]


def environment(monkeypatch: Patch, rank: int, port: int) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:1")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))


def test_a_port_that_is_taken_is_refused_and_not_taken_for_the_store(monkeypatch: Patch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment(monkeypatch, 0, taken.getsockname()[1])
        with pytest.raises(TransportError, match="cannot open the job's store") as raised:
            meeting.open_store(5)
        assert "another program listens there" in str(raised.value)
        monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.2)
        environment(monkeypatch, 1, taken.getsockname()[1])
        with pytest.raises(PipelineTimeout, match="rank 0 did not call") as late:
            meeting.open_store(0.5)
        assert "does not answer as the job's store" in str(late.value)


def test_an_address_of_another_host_is_called_so(monkeypatch: Patch) -> None:
    environment(monkeypatch, 0, 0)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "192.0.2.1:20000")
    with pytest.raises(TransportError, match=r"192\.0\.2\.1 is no address of this host"):
        meeting.open_store(5)


def store_of_two_ranks(monkeypatch: Patch) -> tuple[list[Any], int]:
    """Opens a store as two ranks, of which the environment is left the second's; and its port."""
    stores, port = [], free_port()
    for rank in range(2):
        environment(monkeypatch, rank, port)
        stores.append(meeting.open_store(5))
    assert [store.add("x", 1) for store in stores] == [1, 2]
    return stores, port


def test_the_store_of_another_job_is_not_taken_for_ones_own(monkeypatch: Patch) -> None:
    _, port = store_of_two_ranks(monkeypatch)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", f"127.0.0.1:{port},127.0.0.1:2")
    with pytest.raises(PipelineTimeout, match="rank 0 did not call"):
        meeting.open_store(0.3)


def test_a_rank_left_over_from_an_earlier_life_is_refused_by_name(monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_INCARNATION", "2")
    _stores, _ = store_of_two_ranks(monkeypatch)
    monkeypatch.setenv("FLEETPIPE_INCARNATION", "1")
    said = "rank 1 of attempt 1 of the job was refused: the job is in attempt 2"
    with pytest.raises(TransportError, match=said):
        meeting.open_store(5)
    # A store that is itself left over is waited for, as one that is not there yet.
    monkeypatch.setenv("FLEETPIPE_INCARNATION", "3")
    with pytest.raises(PipelineTimeout, match="rank 0 did not call"):
        meeting.open_store(0.3)
    monkeypatch.setenv("FLEETPIPE_INCARNATION", "third")
    with pytest.raises(ConfigError, match="no number of an attempt"):
        meeting.open_store(5)


def test_paddle_gets_an_address_for_its_own_store(
    monkeypatch: Patch,
) -> None:
    store = MemoryStore()
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:1")
    for name in ("PADDLE_MASTER", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PADDLE_MASTER", "gone")
    monkeypatch.delenv("PADDLE_MASTER")
    came = play(monkeypatch, 2, lambda _: meeting.give_paddle_an_address(store, 5))
    assert came == {0: None, 1: None}
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    assert (host, f"{host}:{port}") == ("127.0.0.1", store.values["fleetpipe/master"])
    assert int(port) != 1


def test_paddles_own_store_at_the_jobs_address_is_refused_on_every_rank(monkeypatch: Patch) -> None:
    for name in ("PADDLE_MASTER", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paddle.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        environment(monkeypatch, rank, 1)
        with pytest.raises(StateError, match=r"Paddle's own store has the address.*\n.*before"):
            meeting.open_store(5)
    monkeypatch.setenv("PADDLE_MASTER", "127.0.0.1:2")
    with pytest.raises(PipelineTimeout, match="rank 0 did not call"):
        meeting.open_store(0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_of_ipv6_is_refused_before_anybody_waits(monkeypatch: Patch, rank: int) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "[fd00::1]:6170,[fd00::2]:6170")
    with pytest.raises(ConfigError, match=r"cannot be served at \[fd00::1\]"):
        meeting.open_store(60)


class OpenedStore(MemoryStore):
    """The store that a process's first job opened."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout


def test_a_later_job_waits_by_its_own_limit(monkeypatch: Patch) -> None:
    monkeypatch.setattr(meeting, "_stores", [])
    monkeypatch.setattr(meeting, "open_store", OpenedStore)
    first = meeting.come_together(0, 60.0)
    assert first.timeout == 60.0
    # The port of rank 0 is taken: by the store that it serves itself.
    assert meeting.come_together(1, 5.0) is first
    assert first.timeout == 5.0


FACTS = {"schedule": "1F1B", "layers": "Linear(2, 3)", "OMP_NUM_THREADS": "1"}


def agree(monkeypatch: Patch, changes: dict[int, dict[str, str]]) -> dict[int, Any]:
    store = MemoryStore()

    def act(rank: int) -> None:
        time.sleep(0.02 * rank)
        require_agreement(store, "first", {**FACTS, **changes.get(rank, {})}, 5)

    return play(monkeypatch, 4, act)


def test_ranks_that_agree_meet_once_and_go_on(monkeypatch: Patch) -> None:
    store = MemoryStore()
    came = play(monkeypatch, 2, lambda _: require_agreement(store, "first", FACTS, 5))
    assert came == {0: None, 1: None}
    met = {key for key in store.counts if key.endswith(("/0", "/1"))}
    assert met == {"first/published/0", "first/published/1"}


def test_the_folder_of_a_trace_is_no_fact() -> None:
    @dataclass
    class Options:
        trace: str | None
        timeout: float = 5.0

    near, far, none = (facts(Options(folder)) for folder in ("/near", "/far", None))
    assert near == far != none
    assert near["timeout"] == "5.0"


def test_every_rank_raises_the_same_with_both_sides(monkeypatch: Patch) -> None:
    layers = {f"layer {i}": "other" for i in range(9)}
    changes = {1: {"schedule": "FThenB", "extra": "5", **layers}, 3: {"schedule": "ZBH1"}}
    raised = agree(monkeypatch, changes)
    assert {type(error) for error in raised.values()} == {ConfigError}
    (text,) = {str(error) for error in raised.values()}
    assert "ranks 0 and 1 of the job do not run the same (nor do ranks [3])\n" in text
    assert "as on rank 0: schedule = 1F1B; extra = nothing; layer 0 = nothing" in text
    assert "on rank 1: schedule = FThenB; extra = 5; layer 0 = other; layer 1 = other; ..\n" in text
    assert "Linear" not in text


def test_a_rank_that_comes_to_no_comparison_is_named(
    monkeypatch: Patch,
) -> None:
    store = MemoryStore()
    raised = play(
        monkeypatch, 2, lambda _: require_agreement(store, "first", FACTS, 0.05), only=(0,)
    )
    assert isinstance(raised[0], PipelineTimeout)
    assert str(raised[0]).startswith("rank 1 did not come to the comparison of what each rank runs")
    assert "fleet.init" not in str(raised[0])


@pytest.mark.parametrize(("ranks", "asked"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("in_step", [0, 1, 3])
def test_all_ranks_stop_one_step_after_a_request(ranks: int, asked: int, in_step: int) -> None:
    hub = MemoryHub(ranks)
    agreements = []
    for rank in range(ranks):
        # Each rank is a process: all count its agreements alike.
        group = DirectGroup(hub.endpoint(rank), 1) if ranks > 1 else SoleGroup()
        agreement = Stopping(group, 1)
        agreement._name = "stop"
        agreements.append(agreement)
    for step in range(6):
        if step == in_step:
            agreements[asked].ask()
        answers = [agreement.agree() for agreement in agreements]
        # One process alone stops after that step itself.
        assert answers == [step > in_step - (ranks == 1)] * ranks


def test_messages_of_later_steps_have_the_keys_of_earlier_ones(
    monkeypatch: Patch,
) -> None:
    hub, keys = MemoryHub(2), set()
    first, second = (Stopping(DirectGroup(hub.endpoint(rank), 1), 1) for rank in range(2))
    second._name = first._name
    send = MemoryTransport.send

    def noted(transport: MemoryTransport, peer: int, key: MessageKey, value: Any) -> None:
        keys.add(key)
        send(transport, peer, key, value)

    monkeypatch.setattr(MemoryTransport, "send", noted)
    for _ in range(10):
        assert not first.agree()
        assert not second.agree()
    assert len(keys) <= 2, "a transport keeps what it knows of each: memory grows"


def bereft() -> tuple[Job, Watch, list[str]]:
    """A job of two ranks of which rank 1 has died; its watch; what its end has called."""
    watch, other = (Watch(rank, ends) for rank, ends in enumerate(sockets_of(2)))
    topology = SimpleNamespace(get_global_rank=lambda: 0)
    job = Job(Degrees(pp=2), topology, 5.0, store=MemoryStore(), watch=watch)
    ended: list[str] = []
    job.endings.append(lambda: ended.append("closed"))
    vanish(other)
    assert soon(lambda: watch.failure)
    return job, watch, ended


def test_the_end_of_a_job_tells_of_a_death_that_was_not_told_before() -> None:
    job, _, ended = bereft()
    with pytest.raises(PeerFailed, match=r"rank 1 died: .*\n.*ending the job"):
        job.close()
    assert ended == ["closed"]


def test_a_job_whose_failure_is_known_ends_in_silence() -> None:
    job, watch, ended = bereft()
    with pytest.raises(PeerFailed, match="rank 1 died"):
        watch.check()
    job.close()
    assert ended == ["closed"]
    job, _, ended = bereft()
    job.close(ValueError("of this rank"))
    assert ended == ["closed"]
