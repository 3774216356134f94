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
from fleetpipe.job.records import LastRecord, RankRecord, RunProgress
from fleetpipe.transport import peer_connections
from fleetpipe.transport.base import STOPPED_SECONDS
from fleetpipe.transport.wire.structure import Seals

_log = log.logger(__name__)

#: Seconds between two records that a rank sends of what it is doing.
STATUS_SECONDS = 0.2
#: Seconds that the main thread has to notice a failure before the process is ended.
GRACE_SECONDS = 1.0
#: Seconds that a rank whose connection ended waits for the failure that caused it.
CAUSE_SECONDS = 0.5
#: Seconds that the last lines of a process may take.
LAST_WORDS_SECONDS = 0.5
#: Exit code of a process that is ended because another rank failed.
EXIT_CODE = 70
#: The file descriptor of standard error.
_STDERR = 2

#: The last failing ``SystemExit`` of this process; see :func:`note_exits`.
_exit: SystemExit | None = None


class _Limit(NamedTuple):
    """The time limit of an operation of the main thread that no exception can interrupt.

    Attributes:
        seconds: The limit.
        what: What the main thread does, for messages; "" if its action says it.
        ranks: The ranks that it may be waiting for.
    """

    seconds: float
    what: str
    ranks: tuple[int, ...]


class Watch:
    """Tells this rank when another one of the job fails, and the others when this one does.

    Attributes:
        rank: This process's rank in the job.
        failure: The failure that ended the job early, once it is known.
        noticed: Whether the main thread knows of a failure, this rank's own or another's.
        progress: The source of this rank's records.
        patient: Whether the main thread may notice a failure late, as the job may replace a rank.
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
            seals: What proves who sent each message, by rank; None without a secret.
        """
        self.rank = rank
        self.failure: Failure | None = None
        self.progress = RunProgress()
        self._limit: _Limit | None = None
        #: The limit and the operation that are being timed, and since when.
        self._timed: _Limit | None = None
        self._timed_status, self._timed_since = "", 0.0
        self._interrupts: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self.noticed = False
        self._closed = self._refused = False
        #: When the process is ended unless its main thread has noticed the failure.
        self._end_at = float("inf")
        #: When the next record is due, and when the thread last looked at the clock.
        self._status_at = 0.0
        self._last_look = time.monotonic()
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
        """Registers a function to call, from any thread, when a rank fails.

        Args:
            interrupt: Ends a wait of the main thread; called at once if a failure is known already.
        """
        with self._lock:
            self._interrupts.append(interrupt)
            failed = self.failure is not None
        if failed:
            interrupt()

    def check(self) -> None:
        """Raises an error if a failure is known.

        Raises:
            PeerFailed: A rank of the job has failed.
            PipelineTimeout: A wait of some rank has reached its limit.
            TransportError: Some rank sent bytes that are not a message.
        """
        if self.failure is not None:
            raise self._error_of(self.failure)

    def gone(self) -> list[int]:
        """Returns the ranks that said goodbye or reported a failure."""
        return [peer.rank for peer in self._peers.values() if peer.left]

    def silent(self) -> list[int]:
        """Returns the ranks whose records are overdue: stopped, or cut off."""
        return [peer.rank for peer in self._peers.values() if peer.silent]

    @contextlib.contextmanager
    def guarding(self, where: Callable[[], str]) -> Iterator[None]:
        """A context whose failures this rank reports to all others: implements ``Job.guarded``.

        Args:
            where: Returns in words what the main thread does; called on any thread.
        """
        self.progress.action = where
        self.check()
        try:
            yield
        except BaseException as error:
            replacement = self._error_to_raise(error)
            if replacement is None:
                raise
            raise replacement from None

    @contextlib.contextmanager
    def limit(self, seconds: float, what: str, ranks: Collection[int]) -> Iterator[None]:
        """A context that ends this process if the main thread is in it for too long.

        The other ranks learn of the failure before. The time starts again when the process reports
        another operation; that of an outer such context starts again when this context ends.

        Args:
            seconds: The longest that the main thread may take.
            what: What the main thread does, for all ranks' messages; "" if its action says it.
            ranks: The ranks that it may be waiting for.
        """
        outer = self._limit
        peers = tuple(rank for rank in ranks if rank != self.rank)
        self._limit = _Limit(seconds, what, peers)
        try:
            yield
        finally:
            # A new object, so that its time starts again.
            self._limit = None if outer is None else outer._replace()

    def give_up(self, error: BaseException) -> None:
        """Reports that this rank fails by ``error`` to all other ranks, with the traceback."""
        self._mark_noticed()
        self._report(Failure.of(self.rank, error))

    def close(self) -> None:
        """Says goodbye to all other ranks and ends the thread. May be repeated."""
        self._mark_noticed()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send_to_all({"kind": "goodbye"})
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
        """Closes the sockets and the selector."""
        for peer in self._peers.values():
            peer.sock.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)
        peer_connections.open_holders.discard(self)

    def _error_to_raise(self, error: BaseException) -> BaseException | None:
        """Returns the error to raise in place of the main thread's; None to raise ``error``.

        If this rank is the first to fail, the raised error is reported to all ranks.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        if isinstance(error, PeerFailed):
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            gone = self.gone()
            if gone and self.failure is None:
                self._report(Failure(gone[0], "left", "its process ended before its work was done"))
        if self.failure is not None and isinstance(error, (PeerFailed, PipelineTimeout)):
            replacement = self._error_of(self.failure)
            # The stack of the wait helps only if the wait itself failed.
            return replacement.with_traceback(error.__traceback__ if self._is_timeout() else None)
        if isinstance(error, PipelineTimeout):
            faulthandler.dump_traceback(_STDERR, all_threads=True)
            replacement = PipelineTimeout("\n".join([str(error), *self._whereabouts()]))
            self.give_up(replacement)
            return replacement.with_traceback(error.__traceback__)
        self.give_up(error)
        return None

    def _error_of(self, failure: Failure) -> FleetPipeError:
        """Returns the error to raise because of a failure, which counts as noticed now."""
        self._mark_noticed()
        if self._is_timeout():
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        return failure.error(f"rank {self.rank}: {self._status()}")

    def _is_timeout(self) -> bool:
        """Returns whether the known failure is a wait that reached its limit."""
        return self.failure is not None and self.failure.what == "timed out"

    def _mark_noticed(self) -> None:
        """Notes that the main thread knows of the failure.

        It waits for the lock, with which the thread may be ending the process already.
        """
        with self._lock:
            self.noticed = True

    def _status(self) -> str:
        """Returns in words what the main thread does; may be called on any thread."""
        try:
            limit = self._limit
            what = "" if limit is None else limit.what
            return self.progress.action() + (what and f": {what}")
        except Exception as error:
            return f"unknown ({error!r})"

    def _whereabouts(self) -> list[str]:
        """Returns for each other rank a line about what it was doing at its last message."""
        return [f"  {peer.whereabouts()}" for peer in self._peers.values()]

    def _check_limit(self) -> None:
        """Reports a failure if the main thread's operation has reached its limit."""
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
        waited_for = f"ranks {ranks}" if ranks[1:] else f"rank {ranks[0]}"
        text = (
            f"rank {self.rank} waited {limit.seconds:g} s for {waited_for}: {limit.what or status}"
        )
        error = PipelineTimeout("\n".join([text, *self._whereabouts()]))
        self._report(Failure.of(self.rank, error))

    def _send_to_all(self, message: dict[str, Any]) -> None:
        """Sends a message to every other rank, without waiting for ranks that do not read."""
        with self._lock:
            for peer in self._peers.values():
                peer.queue_message(message)

    def _make_record(self, with_rows: bool) -> RankRecord:
        """Returns this rank's record; if that fails, one with its action only."""
        try:
            return self.progress.record(self.rank, self._status(), with_rows)
        except Exception as error:
            if not self._refused:
                self._refused = True
                _log.warning("rank %d cannot say how it gets on: %r", self.rank, error)
            return RankRecord(self.rank, self._status())

    def _send_record(self) -> None:
        """Sends this rank's record to all; its steps only to rank 0, which keeps the board."""
        record = self._make_record(with_rows=self.rank != 0)
        content, lean = record.content(), record.lean.content()
        call = [*self.progress.calls.last]
        with self._lock:
            for peer in self._peers.values():
                fields = lean if peer.rank else content
                peer.queue_message({"kind": "status", "record": fields, "call": call})
                if peer.unsent:
                    peer.send()

    def last_records(self) -> dict[int, LastRecord]:
        """Returns the last record of every rank, with its steps since the last call."""
        record = self._make_record(with_rows=True)
        everyone = {self.rank: LastRecord(record)}
        for peer in self._peers.values():
            rows = tuple(peer.rows.popleft() for _ in range(len(peer.rows)))
            record = replace(peer.record, rows=rows)
            everyone[peer.rank] = LastRecord(record, peer.silence, peer.left)
        return everyone

    def _run(self) -> None:
        """Runs the thread: handles events until the watch is closed."""
        try:
            while not self._closed:
                self._wait_and_handle()
        except Exception as error:
            text = f"its watch over the other ranks broke: {error!r}"
            self._report(Failure(self.rank, "raised", text, traceback.format_exc()))
            while not self._closed:
                self._end_if_unnoticed()
                time.sleep(GRACE_SECONDS / 10)

    def _wait_and_handle(self) -> None:
        """Waits for the next event, a message or a due time, and handles it."""
        now = time.monotonic()
        if now - self._last_look > STOPPED_SECONDS:
            # This process was stopped: all timers start again.
            for peer in self._peers.values():
                peer.heard = now
            if self._end_at < float("inf"):
                self._end_at = now + GRACE_SECONDS
        self._last_look = now
        if now >= self._status_at:
            self._status_at = now + STATUS_SECONDS
            self._send_record()
            self._compare_calls()
        self._check_limit()
        self._end_if_unnoticed()
        for key, _ in self._selector.select(max(0.0, min(self._status_at, self._end_at) - now)):
            if key.data is not None and not self._closed:
                self._handle_messages(key.data)

    def _compare_calls(self) -> None:
        """Reports a failure if a rank's last collective call is not this rank's of that number."""
        calls = self.progress.calls
        for peer in () if self.patient else self._peers.values():
            call = calls.mismatch(peer.call, peer.rank in calls.replica)
            if call is not None:
                text = f"it {peer.call.words} where rank {self.rank} {call.words}"
                self._report(Failure(peer.rank, "makes another call", text, permanent=True))

    def _handle_messages(self, peer: Peer) -> None:
        """Reads a rank's messages; reports its failure, or the end of its stream."""
        damage = ""
        try:
            for failure in peer.read_failures():
                self._report(failure)
        except (ValueError, TransportError) as error:
            damage = f"to the watch of rank {self.rank}: {error}"
        if damage or peer.ended:
            self._selector.unregister(peer.sock)
        if damage:
            self._report(Failure(peer.rank, "sent bytes that are no message", damage))
        elif peer.ended and not peer.left:
            last_heard = f"last heard {peer.silence:.1f} s before, at: {peer.record.action}"
            self._report(Failure(peer.rank, "died", f"it ended without a goodbye; {last_heard}"))

    def _report(self, failure: Failure) -> None:
        """Stores the first failure, passes it on to all ranks, and ends this rank's waits."""
        with self._lock:
            if self.failure is not None or self._closed:
                return
            self.failure = failure
            self._end_at = time.monotonic() + GRACE_SECONDS
            interrupts = list(self._interrupts)
        self._send_to_all({"kind": "failure", **asdict(failure)})
        attempt_files.tell_failure(failure)
        for interrupt in interrupts:
            interrupt()

    def _end_if_unnoticed(self) -> None:
        """Ends the process if its main thread has not noticed the failure in time."""
        if time.monotonic() < self._end_at:
            return
        self._end_at = float("inf")
        if self.patient and self._limit is None:
            return
        with self._lock:
            if self.noticed or self._closed or self.failure is None:
                return
            # In a thread of their own: the main thread may hold a lock that they need.
            printing = threading.Thread(target=self._last_words, args=(self.failure,), daemon=True)
            printing.start()
            printing.join(LAST_WORDS_SECONDS)
            os._exit(EXIT_CODE)

    def _last_words(self, failure: Failure) -> None:
        """Prints the error of a failure before this process is ended."""
        error = failure.error(f"rank {self.rank}: {self._status()}")
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        if self._is_timeout():
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        sys.stderr.flush()
        sys.stdout.flush()


def note_exits() -> None:
    """Makes ``sys.exit`` store the ``SystemExit`` of each call with a status that means failure.

    Python does not report a ``SystemExit`` that ends a process: no hook is called, and it is gone
    when the exit functions run.
    """
    if hasattr(sys.exit, "__wrapped__"):
        return
    original = sys.exit

    @functools.wraps(original)
    def exit_with(status: Any = None, /) -> None:
        """Ends the process as ``sys.exit`` does; stores the ``SystemExit`` of a failure."""
        global _exit
        try:
            original(status)
        except SystemExit as error:
            _exit = error if status else None
            raise

    sys.exit = exit_with  # type: ignore[assignment]


def error_at_exit() -> BaseException | None:
    """Returns the error that ends this process: an uncaught one, or a failing ``sys.exit``."""
    uncaught: BaseException | None = getattr(sys, "last_value", None)
    return uncaught if uncaught is not None else _exit


def end_with_error(error: BaseException) -> NoReturn:
    """Ends the process at once with ``error`` in its log, where raising it would not end it."""
    try:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # the reader of the stream may be gone
        os._exit(EXIT_CODE)
