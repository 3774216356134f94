"""The watch between ranks, played by threads of one process over socket pairs."""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from fleetpipe.errors import ConfigError, PeerFailed, PipelineTimeout, TransportError
from fleetpipe.job import peer as peers
from fleetpipe.job import watch as module
from fleetpipe.job.attempt_files import Failure
from fleetpipe.job.records import MOST_ROWS, CollectiveCall, RankRecord
from fleetpipe.job.watch import Watch
from fleetpipe.transport.wire.structure import Seal, Seals
from tests.fixtures import Capture, Patch

pytestmark = pytest.mark.no_paddle


Begin = Callable[[int], "list[Watch]"]


def sockets_of(ranks: int) -> list[dict[int, socket.socket]]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for low, high in combinations(range(ranks), 2):
        ends[low][high], ends[high][low] = socket.socketpair()
    return ends


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Makes the watches of some ranks, which are closed at the end."""
    made: list[Watch] = []

    def make(ranks: int) -> list[Watch]:
        made.extend(Watch(rank, ends) for rank, ends in enumerate(sockets_of(ranks)))
        return made

    yield make
    for watch in made:
        watch.close()


@pytest.fixture(autouse=True)
def exits(monkeypatch: Patch) -> list[int]:
    """The exit codes with which a watch would have ended this process."""
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    return codes


def soon(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def vanish(watch: Watch) -> None:
    """Ends a rank's connections as the kernel does when its process is killed."""
    watch._closed = True
    os.write(watch._waker, b"w")
    watch._thread.join()
    for peer in watch._peers.values():
        peer.sock.shutdown(socket.SHUT_RDWR)


def fail(watch: Watch, error: BaseException) -> None:
    with pytest.raises(type(error)), watch.guarding(lambda: "operation F0.1"):
        raise error


def test_an_error_reaches_all_with_its_traceback(begin: Begin) -> None:
    first, second, third = begin(3)
    woken = threading.Event()
    second.on_failure(woken.set)
    fail(first, ValueError("bad value\nin line 2"))
    assert woken.wait(5)
    assert soon(lambda: third.failure)
    late = threading.Event()
    third.on_failure(late.set)
    assert late.is_set()
    with pytest.raises(PeerFailed) as raised, second.guarding(lambda: "operation F1.0"):
        pytest.fail("a failure that is known is raised at once")
    text = str(raised.value)
    assert text.startswith("rank 0 raised: ValueError: bad value in line 2\n")
    assert "| Traceback (most recent call last):" in text
    assert "raise error\n" in text
    assert "where: rank 1: operation F1.0" in text
    error = "rank 0 raised ValueError: bad value in line 2"
    assert raised.value.brief == f"rank 1: operation F1.0: ends because {error}"


def test_a_connection_that_ends_is_a_death_and_a_goodbye_is_none(begin: Begin) -> None:
    first, second, third = begin(3)
    assert first.gone() == []
    second.close()
    assert soon(lambda: first.gone() == third.gone() == [1])
    time.sleep(0.05)
    assert first.failure is third.failure is None
    vanish(third)
    assert soon(lambda: first.failure)
    # Raised by the store that asks, and only where it still waits for somebody.
    assert first.gone() == [1]
    with pytest.raises(PeerFailed, match="rank 2 died: it ended without a goodbye"):
        first.check()


def test_what_broke_in_consequence_is_replaced_by_the_cause(begin: Begin) -> None:
    first, _, third = begin(3)
    threading.Timer(0.1, vanish, [third]).start()
    with pytest.raises(PeerFailed, match="rank 2 died"), first.guarding(lambda: ""):
        raise PeerFailed("rank 1 is gone")


def test_whoever_leaves_because_of_a_failure_is_not_taken_for_its_origin(begin: Begin) -> None:
    first, second, third = begin(3)
    # Rank 0 does not see the death of rank 2 itself: it hears of it from rank 1.
    first._selector.unregister(first._peers[2].sock)
    vanish(third)
    assert soon(lambda: second.failure)
    second.close()
    assert soon(lambda: first.failure)
    assert first.failure is not None
    assert first.failure.rank == 2


def test_a_rank_that_left_while_it_was_needed_is_named(begin: Begin) -> None:
    first, second, third = begin(3)
    second.close()
    assert soon(lambda: first._peers[1].left)
    with pytest.raises(PeerFailed, match="rank 1 left: its"), first.guarding(lambda: ""):
        raise PeerFailed("rank 1 has left")
    assert soon(lambda: third.failure)
    assert third.failure is not None
    assert (third.failure.rank, third.failure.what) == (1, "left")


def test_a_timeout_says_where_all_ranks_are(begin: Begin, capfd: Capture) -> None:
    first, second, third = begin(3)
    second.progress.action = lambda: "operation F1.2"
    third.progress.action = lambda: "operation B2.0, waiting for rank 1"
    assert soon(lambda: "F1.2" in first._whereabouts()[0] and "B2.0" in first._whereabouts()[1])
    with pytest.raises(PipelineTimeout) as raised, first.guarding(lambda: ""):
        raise PipelineTimeout("rank 0 waited 5 s", cause="unknown")
    assert "  rank 1 is at: operation F1.2\n" in str(raised.value)
    assert "  rank 2 is at: operation B2.0, waiting for rank 1" in str(raised.value)
    assert "most recent call first" in capfd.readouterr().err
    assert soon(lambda: second.failure)
    with pytest.raises(PipelineTimeout, match="rank 0 timed out: rank 0 waited 5 s") as told:
        second.check()
    assert "| " in str(told.value)
    assert "where: rank 1: operation F1.2" in str(told.value)
    assert "most recent call first" in capfd.readouterr().err


def test_a_main_thread_that_hangs_is_given_up(
    begin: Begin, exits: list[int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(peers, "SILENT_SECONDS", 0.6)
    first, second, third = begin(3)
    second.progress.action = lambda: "elsewhere"
    third._status_at = time.monotonic() + 3600  # stopped
    with first.limit(1.0, "making a group", range(3)):
        assert soon(
            lambda: "outside of the pipeline: making a group" in second._peers[0].record.action
        )
        assert soon(lambda: module.EXIT_CODE in exits)
    assert soon(lambda: second.failure)
    for watch in (first, second):
        with pytest.raises(PipelineTimeout) as raised:
            watch.check()
        text = str(raised.value)
        assert "rank 0 timed out: rank 0 waited 1 s for rank 2: making a group\n" in text
        assert "rank 1 is at: elsewhere" in text
        assert "rank 2 is silent" in text


def test_a_limit_begins_anew_where_one_within_it_ends(begin: Begin, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.05)
    first, second = begin(2)
    with first.limit(0.8, "all", [1]):
        for _ in range(3):
            with first.limit(0.8, "a part", [1]):
                time.sleep(0.3)
        time.sleep(0.1)
    time.sleep(0.8)
    assert first.failure is second.failure is None


def test_a_limit_begins_anew_with_an_action(
    begin: Begin, exits: list[int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "STATUS_SECONDS", 0.05)
    first, second = begin(2)
    with first.limit(0.8, "", [1]):
        for number in range(4):
            first.progress.action = functools.partial("operation F0.{}".format, number)
            time.sleep(0.3)
        assert first.failure is None
        assert soon(lambda: second.failure)
    with pytest.raises(PipelineTimeout, match=r"waited 0\.8 s for rank 1: operation F0\.3"):
        second.check()


def test_an_unaware_process_is_ended(
    begin: Begin, exits: list[int], monkeypatch: Patch, capfd: Capture
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    _, second = begin(2)
    vanish(second)
    assert soon(lambda: exits)
    assert exits == [module.EXIT_CODE]
    said = capfd.readouterr().err
    assert said.count("PeerFailed: rank 1 died") == 1
    assert "most recent call first" not in said


def test_a_process_that_ends_is_left_alone(
    begin: Begin, exits: list[int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    first, second, third = begin(3)
    fail(third, ValueError("own error"))
    for watch in (first, second):
        assert soon(lambda watch=watch: watch.failure)  # type: ignore[misc]
        with pytest.raises(PeerFailed):
            watch.check()
    time.sleep(0.5)
    assert exits == []


def test_a_peer_that_does_not_read_holds_up_nobody(begin: Begin) -> None:
    first, second, third = begin(3)
    peer = first._peers[1]
    record_of_rank = RankRecord(0, "x" * 100).content()
    # Without its lock the second one cannot read, however fast this thread writes.
    with first._lock, second._lock:
        while not peer.unsent:
            peer.queue_message(
                {"kind": "status", "record": record_of_rank, "call": [*CollectiveCall()]}
            )
    fail(first, ValueError("boom"))
    assert soon(lambda: third.failure)


def record(rank: int = 1, **fields: object) -> bytes:
    """The frame of a record that is none, or of another rank."""
    fields = {"rank": rank, **fields} if fields else {"rank": rank, "action": "F", "step": None}
    call = [*CollectiveCall()]
    return framed(json.dumps({"kind": "status", "record": fields, "call": call}).encode())


FAILURE = (
    b'{"kind": "failure", "rank": 1, "what": "died", "text": "", "details": "", "permanent": false}'
)


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 8,
        framed(b"abc"),
        framed(b"{}"),
        framed(b"[]"),
        framed(b"7"),
        framed(b'"goodbye"'),
        framed(b"[" * 1000 + b"]" * 1000),
        framed(b'{"kind":"status","record":' + b"[" * 1000 + b"]" * 1000 + b"}"),
        framed(b'{"kind": "status", "record": 7}'),
        framed(b'{"kind": "status", "record": {}, "call": [1, 1, "trains", 7]}'),
        framed(b'{"kind": ["status"], "record": {}}'),
        record(action="F0.1", rows=[[0, 1, 1, 1, 0, 0, [], []]] * (MOST_ROWS + 1)),
        framed(FAILURE.replace(b"died", b"?")),
        framed(FAILURE.replace(b"1", b'"1"')),
        framed(FAILURE.replace(b"false", b"0")),
        framed(b'{"kind": "failure", "what": "died"}'),
    ],
)
def test_bytes_that_are_no_message_end_all_by_name(begin: Begin, words: bytes) -> None:
    first, second, third = begin(3)
    second._peers[0].sock.send(words)
    assert soon(lambda: first.failure and third.failure)
    for watch in (first, third):
        with pytest.raises(TransportError) as raised:
            watch.check()
        told = "rank 1 sent bytes that are no message: to the watch of rank 0: "
        assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    "words",
    [
        record(),
        record(rank=2),
        record(action=7),
        record(action="F0.1", step=-1),
        record(action="F0.1", step=1.5),
        record(action="F0.1", busy="1"),
        record(action="F0.1", news=1),
        record(action="F0.1", rows=[[0, 1, 1, 1, 0, [], []]]),
    ],
)
def test_an_invalid_record_is_left_out(begin: Begin, words: bytes, monkeypatch: Patch) -> None:
    """The job goes on, and knows of the rank what it last said in order."""
    said: list[object] = []
    monkeypatch.setattr(peers._log, "warning", lambda text, *values: said.append(text % values))
    first, second = begin(2)
    second._peers[0].sock.send(words * 2)
    second.progress.step = 7
    assert soon(lambda: first._peers[1].record.step == 7)
    (text,) = said
    assert str(text).startswith("a record of rank 1 was left out, and so are others: ")
    assert first.failure is second.failure is None


def test_a_rank_without_a_record_says_what_it_does(begin: Begin, monkeypatch: Patch) -> None:
    said: list[object] = []
    monkeypatch.setattr(module._log, "warning", lambda text, *values: said.append(text % values))
    first, second = begin(2)
    first.progress.gradient_norm = lambda: 1 / 0
    for action, told in ((lambda: "in step 3", "in step 3"), (lambda: str(1 / 0), "unknown (Zero")):
        first.progress.action = action
        assert soon(lambda told=told: told in second._peers[0].record.action)  # type: ignore[misc]
    assert said == ["rank 0 cannot say how it gets on: ZeroDivisionError('division by zero')"]
    assert first.failure is second.failure is None


def test_a_stopped_process_blames_nobody(
    begin: Begin, exits: list[int], monkeypatch: Patch
) -> None:
    """Suspended for 100 s, with a failure that its main thread had no time to notice."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 60.0)
    first, second, third = begin(3)
    vanish(third)
    assert soon(lambda: first.failure)
    clock = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + 100)
    assert soon(lambda: first._last_look > clock() + 50)
    assert exits == []
    assert "silent" not in first._whereabouts()[0]
    assert second.failure is not None


def test_a_broken_watch_fails_its_rank(begin: Begin, monkeypatch: Patch, exits: list[int]) -> None:
    first, second = begin(2)
    monkeypatch.setattr(first, "_handle_messages", lambda peer: 1 / 0)
    assert soon(lambda: second.failure)
    assert second.failure is not None
    assert second.failure.rank == 0
    assert "its watch over the other ranks broke" in second.failure.text


def test_a_forked_child_keeps_no_connection_open(begin: Begin) -> None:
    first, second = begin(2)
    reading, writing = os.pipe()
    with first._lock:  # as if another thread held it at the moment of the fork
        child = os.fork()
    if child == 0:
        os.close(writing)
        for watch in (first, second):
            watch.close()
        os.read(reading, 1)
        os.kill(os.getpid(), 9)
    vanish(second)
    second._peers[0].sock.close()
    try:
        assert soon(lambda: first.failure)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_closed_watch_leaves_no_thread() -> None:
    before = threading.active_count()
    for watch in [Watch(rank, ends) for rank, ends in enumerate(sockets_of(3))]:
        watch.close()
        watch.close()
    assert threading.active_count() <= before


def test_a_failure_says_what_to_do() -> None:
    assert "read the log of rank 3" in str(Failure(3, "died", "it ended").error())
    assert "waits for no other" in str(Failure(3, "timed out", "late").error())
    ended = str(Failure(3, "left", "its process ended").error())
    assert "fewer batches" in ended
    assert "failed first" not in ended
    failure = Failure.of(3, ConfigError("no", expected="yes"))
    assert (failure.text, "expected: yes" in failure.details) == ("ConfigError: no", True)


def test_sealed_news_pass_and_forged_ones_end_all() -> None:
    ends = sockets_of(2)
    keys = Seals(Seal(b"a"), Seal(b"b")), Seals(Seal(b"b"), Seal(b"a"))
    first, second = (Watch(r, ends[r], {1 - r: keys[r]}) for r in range(2))
    second.progress.action = lambda: "operation F1.2"
    assert soon(lambda: first._peers[1].record.action == "operation F1.2")
    second._peers[0].sock.send(framed(b'{"kind": "goodbye"}') + b"s" * 16)
    assert soon(lambda: first.failure)
    with pytest.raises(TransportError, match="does not have the seal"):
        first.check()
    for watch in (first, second):
        watch.close()
