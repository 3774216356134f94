"""Tells every rank of a job when another one fails, and where each of them was.

A thread of each rank has a connection to every other rank. It carries records of what a rank is
doing (five times a second), failures, and goodbyes; a connection that ends without a goodbye means
that the rank died. A failure ends every wait of this rank at once; if the rank computes or hangs in
something else, the thread ends the process a moment later. Each rank passes a failure on before it
leaves, so that all ranks name the rank that failed first. At exit, :func:`error_at_exit` returns
the error that ends this process, for the other ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple, NoReturn

from fleetpipe import log
from fleetpipe.errors import FleetPipeError, PeerFailed, PipelineTimeout, TransportError
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Failure
from fleetpipe.job.peer import Peer
from fleetpipe.job.records import Heard, RankRecord, RunProgress
from fleetpipe.transport import peer_connections
from fleetpipe.transport.base import STOPPED_SECONDS
from fleetpipe.transport.wire.structure import Seals

_log = log.logger(__name__)

#: Seconds between two records of what a rank is doing.
STATUS_SECONDS = 0.2
#: Seconds that the main thread has to notice a failure before the process is ended.
GRACE_SECONDS = 1.0
#: Seconds that a rank whose connection ended waits for the failure that caused it.
CAUSE_SECONDS = 0.5
#: Seconds that the last lines of a process may take.
LAST_WORDS_SECONDS = 0.5
#: Exit code of a process that is ended because another rank failed.
EXIT_CODE = 70
_STDERR = 2

_exit: SystemExit | None = None


class _Limit(NamedTuple):
    """An operation of the main thread that no exception can interrupt, and its time limit."""

    seconds: float
    what: str
    ranks: tuple[int, ...]


class Watch:
    """One rank's end of the connections between all ranks of a job.

    Attributes:
        rank: This process's rank in the job.
        failure: The failure that ended the job early, once it is known.
        progress: The source of this rank's records.
        patient: Whether a computing main thread may notice a failure late, as in a job that heals.
    """

    patient = False

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        seals: Mapping[int, Seals] | None = None,
    ) -> None:
        """Takes over one connected socket for each other rank, and starts the thread.

        Args:
            rank: This process's rank in the job.
            sockets: Authenticated stream sockets, by rank.
            seals: Proofs of who sent each message, by rank; None without a secret.
        """
        self.rank = rank
        self.failure: Failure | None = None
        self.progress = RunProgress()
        self._limit: _Limit | None = None
        self._timed: _Limit | None = None
        self._timed_status, self._timed_since = "", 0.0
        self._interrupts: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._noticed = False
        self._closed = self._refused = False
        self._end_at = float("inf")
        self._status_at = 0.0
        self._turned = time.monotonic()
        self._peers = {r: Peer(r, sock, (seals or {}).get(r)) for r, sock in sockets.items()}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer in self._peers.values():
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        peer_connections.open_holders.add(self)
        self._thread = threading.Thread(target=self._run, name="fleetpipe-watch", daemon=True)
        self._thread.start()

    def on_failure(self, interrupt: Callable[[], None]) -> None:
        """Registers a function to call, from any thread, when a rank fails: it ends a wait."""
        with self._lock:
            self._interrupts.append(interrupt)
            failed = self.failure is not None
        if failed:
            interrupt()

    @property
    def noticed(self) -> bool:
        """Whether the main thread knows of a failure, this rank's own or another's."""
        return self._noticed

    def check(self) -> None:
        """Raises an error if a failure is known.

        Raises:
            PeerFailed: A rank of the job has failed.
            PipelineTimeout: A wait of some rank has reached its limit.
            TransportError: Some rank sent bytes that are not a message.
        """
        if self.failure is not None:
            raise self._as_error(self.failure)

    def gone(self) -> list[int]:
        """Returns the ranks that have ended."""
        return [peer.rank for peer in self._peers.values() if peer.left]

    def silent(self) -> list[int]:
        """Returns the ranks whose records are overdue: stopped, or cut off."""
        return [peer.rank for peer in self._peers.values() if peer.silent]

    @contextlib.contextmanager
    def guarding(self, where: Callable[[], str]) -> Iterator[None]:
        """Implements ``Job.guarded``; ``where`` is called on any thread."""
        self.progress.action = where
        self.check()
        try:
            yield
        except BaseException as error:
            instead = self._instead_of(error)
            if instead is None:
                raise
            raise instead from None

    @contextlib.contextmanager
    def limit(self, seconds: float, what: str, ranks: Collection[int]) -> Iterator[None]:
        """While it is open, ends a main thread that waits too long and cannot be interrupted.

        The other ranks are told, and this process is ended a moment later. An outer limit starts
        again when this one ends, and each starts again when the process reports another operation.

        Args:
            seconds: The longest that the main thread may take.
            what: What the main thread does, for all ranks' messages; "" if its action says it.
            ranks: The ranks that it may be waiting for.
        """
        around = self._limit
        peers = tuple(rank for rank in ranks if rank != self.rank)
        self._limit = _Limit(seconds, what, peers)
        try:
            yield
        finally:
            # A new object, so that its time starts again.
            self._limit = None if around is None else around._replace()

    def give_up(self, error: BaseException) -> None:
        """Reports this rank's failure to all other ranks, with the error and its traceback."""
        self._notice()
        self._fail(Failure.of(self.rank, error))

    def close(self) -> None:
        """Says goodbye to all other ranks and ends the thread. May be repeated."""
        self._notice()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._tell({"kind": "goodbye"})
        os.write(self._waker, b"w")
        self._thread.join()
        for peer in self._peers.values():
            peer.end()
        self._release()

    def abandon(self) -> None:
        """Closes this process's copies of the sockets after a fork; the parent's stay open."""
        # The parent's thread may have held the lock, and does not run here to give it back.
        self._lock = threading.RLock()
        self._closed = True
        self._release()

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.sock.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)
        peer_connections.open_holders.discard(self)

    def _instead_of(self, error: BaseException) -> BaseException | None:
        """Returns the error to raise in place of ``error``, and reports that one to all ranks."""
        deadline = time.monotonic() + CAUSE_SECONDS
        if isinstance(error, PeerFailed):
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            gone = self.gone()
            if gone and self.failure is None:
                self._fail(Failure(gone[0], "left", "its process ended before its work was done"))
        if self.failure is not None and isinstance(error, (PeerFailed, PipelineTimeout)):
            error_of_peer = self._as_error(self.failure)
            # The stack of the wait helps only if the wait itself failed.
            return error_of_peer.with_traceback(error.__traceback__ if self._is_late() else None)
        if isinstance(error, PipelineTimeout):
            faulthandler.dump_traceback(_STDERR, all_threads=True)
            error_of_peer = PipelineTimeout("\n".join([str(error), *self._whereabouts()]))
            self.give_up(error_of_peer)
            return error_of_peer.with_traceback(error.__traceback__)
        self.give_up(error)
        return None

    def _as_error(self, failure: Failure) -> FleetPipeError:
        self._notice()
        if self._is_late():
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        return failure.error(f"rank {self.rank}: {self._status()}")

    def _is_late(self) -> bool:
        return self.failure is not None and self.failure.what == "timed out"

    def _notice(self) -> None:
        """Records that the main thread knows of the failure; never returns if it comes too late."""
        with self._lock:
            self._noticed = True

    def _status(self) -> str:
        try:
            limit = self._limit
            what = "" if limit is None else limit.what
            return self.progress.action() + (what and f": {what}")
        except Exception as error:
            return f"unknown ({error!r})"

    def _whereabouts(self) -> list[str]:
        """Describes for each other rank what it was doing at its last message."""
        return [f"  {peer.whereabouts()}" for peer in self._peers.values()]

    def _give_up_if_late(self) -> None:
        limit, now = self._limit, time.monotonic()
        if limit is None or self.failure is not None:
            return
        status = self._status()
        if limit is not self._timed or status != self._timed_status:
            self._timed, self._timed_status, self._timed_since = limit, status, now
        if now - self._timed_since < limit.seconds:
            return
        silent = [rank for rank in limit.ranks if self._peers[rank].silent]
        ranks = silent or list(limit.ranks)
        who = f"ranks {ranks}" if ranks[1:] else f"rank {ranks[0]}"
        text = f"rank {self.rank} waited {limit.seconds:g} s for {who}: {limit.what or status}"
        late = PipelineTimeout("\n".join([text, *self._whereabouts()]))
        self._fail(Failure.of(self.rank, late))

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message to every rank, without waiting for ranks that do not read."""
        with self._lock:
            for peer in self._peers.values():
                peer.tell(message)

    def _record(self, with_rows: bool) -> RankRecord:
        """Returns this rank's record; if that fails, one with its action only."""
        try:
            return self.progress.record(self.rank, self._status(), with_rows)
        except Exception as error:
            if not self._refused:
                self._refused = True
                _log.warning("rank %d cannot say how it gets on: %r", self.rank, error)
            return RankRecord(self.rank, self._status())

    def _tell_record(self) -> None:
        """Sends this rank's record; its rows of steps only to rank 0, which has the board."""
        record = self._record(with_rows=self.rank != 0)
        content, lean = record.content(), record.lean.content()
        call = [*self.progress.calls.last]
        with self._lock:
            for peer in self._peers.values():
                fields = lean if peer.rank else content
                peer.tell({"kind": "status", "record": fields, "call": call})
                if peer.unsent:
                    peer.send()

    def heard(self) -> dict[int, Heard]:
        """Returns the last record of every rank, with its new steps since the last call."""
        record = self._record(with_rows=True)
        everyone = {self.rank: Heard(record)}
        for peer in self._peers.values():
            rows = tuple(peer.rows.popleft() for _ in range(len(peer.rows)))
            record = replace(peer.record, rows=rows)
            everyone[peer.rank] = Heard(record, peer.silence, peer.left)
        return everyone

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except Exception as error:
            text = f"its watch over the other ranks broke: {error!r}"
            self._fail(Failure(self.rank, "raised", text, traceback.format_exc()))
            while not self._closed:
                self._end_if_unnoticed()
                time.sleep(GRACE_SECONDS / 10)

    def _turn(self) -> None:
        """Waits for the next event: a message, the time of the next record, or the end."""
        now = time.monotonic()
        if now - self._turned > STOPPED_SECONDS:
            # This process was stopped: all timers start again.
            for peer in self._peers.values():
                peer.heard = now
            if self._end_at < float("inf"):
                self._end_at = now + GRACE_SECONDS
        self._turned = now
        if now >= self._status_at:
            self._status_at = now + STATUS_SECONDS
            self._tell_record()
            self._compare_calls()
        self._give_up_if_late()
        self._end_if_unnoticed()
        for key, _ in self._selector.select(max(0.0, min(self._status_at, self._end_at) - now)):
            if key.data is not None and not self._closed:
                self._read(key.data)

    def _compare_calls(self) -> None:
        """Ends the job if the last call of some rank is of another kind than this rank's was."""
        calls = self.progress.calls
        for peer in () if self.patient else self._peers.values():
            call = calls.mismatch(peer.call, peer.rank in calls.replica)
            if call is not None:
                text = f"it {peer.call.words} where rank {self.rank} {call.words}"
                self._fail(Failure(peer.rank, "makes another call", text, permanent=True))

    def _read(self, peer: Peer) -> None:
        damage = ""
        try:
            for failure in peer.hear():
                self._fail(failure)
        except (ValueError, TransportError) as error:
            damage = f"to the watch of rank {self.rank}: {error}"
        if damage or peer.ended:
            self._selector.unregister(peer.sock)
        if damage:
            self._fail(Failure(peer.rank, "sent bytes that are no message", damage))
        elif peer.ended and not peer.left:
            last = f"last heard {peer.silence:.1f} s before, at: {peer.record.action}"
            self._fail(Failure(peer.rank, "died", f"it ended without a goodbye; {last}"))

    def _fail(self, failure: Failure) -> None:
        """Stores the first failure, passes it on, and ends this rank's waits."""
        with self._lock:
            if self.failure is not None or self._closed:
                return
            self.failure = failure
            self._end_at = time.monotonic() + GRACE_SECONDS
            interrupts = list(self._interrupts)
        self._tell({"kind": "failure", **asdict(failure)})
        attempt_files.tell_failure(failure)
        for interrupt in interrupts:
            interrupt()

    def _end_if_unnoticed(self) -> None:
        """Ends the process if its main thread computes or hangs and so misses the failure."""
        if time.monotonic() < self._end_at:
            return
        self._end_at = float("inf")
        if self.patient and self._limit is None:
            return
        with self._lock:
            if self._noticed or self._closed or self.failure is None:
                return
            # In a thread of their own: the main thread may hold a lock that they need.
            words = threading.Thread(target=self._last_words, args=(self.failure,), daemon=True)
            words.start()
            words.join(LAST_WORDS_SECONDS)
            os._exit(EXIT_CODE)

    def _last_words(self, failure: Failure) -> None:
        error = failure.error(f"rank {self.rank}: {self._status()}")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        if self._is_late():
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        sys.stderr.flush()
        sys.stdout.flush()


def note_exits() -> None:
    """Makes ``sys.exit`` remember each call with a status that means failure.

    Python does not report a ``SystemExit`` that ends a process: no hook is called, and it is gone
    when the exit functions run.
    """
    if hasattr(sys.exit, "__wrapped__"):
        return
    original = sys.exit

    @functools.wraps(original)
    def exit_with(status: Any = None, /) -> None:
        global _exit
        try:
            original(status)
        except SystemExit as error:
            _exit = error if status else None
            raise

    sys.exit = exit_with  # type: ignore[assignment]


def error_at_exit() -> BaseException | None:
    """Returns the error that ends this process: an uncaught one, or a failing sys.exit."""
    uncaught: BaseException | None = getattr(sys, "last_value", None)
    return uncaught if uncaught is not None else _exit


def end_with_error(error: BaseException) -> NoReturn:
    """Ends the process at once, with ``error`` in its log, if no exception could."""
    try:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # the reader of the stream may be gone
        os._exit(EXIT_CODE)
