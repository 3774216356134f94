"""A host's part in the copies of states: its own go to a neighbour, those of another one come here.

The supervisor of each host has it. Ranks do not wait for any of it: what is to be sent stays in
their segments meanwhile, and threads of the supervisor send and take it. The leading supervisor
says what is to be done, by messages; what has been done comes as messages for it.

    kept/rank-0.1    a segment that a rank of this host writes
    held/rank-1.1    a copy of one, of the host before this one in the ring
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from fleetpipe.errors import CheckpointError
from fleetpipe.job import life
from fleetpipe.launch.keeping.passing import COPIES, FAILURES, GIVEN_BACK, Ended, Passage, Refused
from fleetpipe.launch.keeping.pins import SLOTS, SLOTS_WITH_NEIGHBOUR, Pins
from fleetpipe.launch.keeping.places import Claim
from fleetpipe.launch.keeping.rounds import FAILED, MISSED, WHOLE
from fleetpipe.launch.keeping.slots import Slots, Stamp
from fleetpipe.transport.joining import hosts

#: A message from or to the leading supervisor.
Message = dict[str, Any]
#: The kinds of those from it.
TO_COPIES = ("mirror", "expect", "give")

#: Which folder of a host has what it gives, by what a connection is for.
_GIVEN = {GIVEN_BACK: "held", COPIES: "kept"}
_LOOK_SECONDS = 0.05
#: Seconds in which another host has to answer, and after which it is asked again.
_CONNECT_SECONDS, _AGAIN_SECONDS = 5.0, 0.5
_MOST_CONNECTIONS = 8


@dataclass
class _Stage:
    """What this host takes from others: copies while a life runs, before it what was its own.

    Attributes:
        life: The number of the life.
        own: Whether it is to be given back what was its own.
        over: Set when it has ended.
    """

    life: int = 0
    own: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return not self.over.is_set()


class Copies:
    """The states of this host's ranks, and of its neighbour's, in the memory of both."""

    def __init__(self, folder: Path, address: str, warn: Callable[[str], None]) -> None:
        """Listens for the neighbour.

        Args:
            folder: The supervisor's folder in memory; ranks keep their states in ``kept`` there.
            address: Of this host, as the other ones reach it.
            warn: Tells the user.

        Raises:
            TransportError: The address is none of this host.
        """
        self._folder = folder
        self._kept, self._held = folder / "kept", folder / "held"
        self._held.mkdir()
        self._warn = warn
        self._warned = False
        self._listener = hosts.listen_tcp(address).sock
        self._address = address
        self.port = int(self._listener.getsockname()[1])
        #: Where this host is, or was, in the ring.
        self.claim = Claim()
        self._stage = _Stage()
        self._sending = threading.Event()
        self._taking = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._over = threading.Event()
        self._news: deque[Message] = deque()
        self._read, self._wake = socket.socketpair()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def where(self) -> str:
        """Where this host takes copies."""
        return f"{self._address}:{self.port}"

    def fileno(self) -> int:
        """Returns the descriptor that can be read when there is news."""
        return self._read.fileno()

    def news(self) -> list[Message]:
        """Returns what the leading supervisor is to be told."""
        self._read.recv(64)
        return [self._news.popleft() for _ in range(len(self._news))]

    def begin(self, place: Claim, mark: int, neighbour: str, home: Path) -> None:
        """Begins a life, before any rank does.

        Args:
            place: This host's place in it.
            mark: The mark of the life.
            neighbour: The address that takes this host's states; "" where none does.
            home: The folder of the life.
        """
        self.end()
        if place[1:] != self.claim[1:]:
            self._forget()  # what was kept in another place is of no use any more
        self.claim = place
        self._stage = _Stage(place.life)
        self._neighbour, self._home = neighbour, home
        if neighbour:
            Pins(self._kept).life = mark
        else:
            Pins.remove(self._kept)

    def end(self) -> None:
        """Ends a life: what is under way is given up."""
        self._sending.set()
        self._stage.over.set()
        for sock in list(self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def obey(self, message: Mapping[str, Any]) -> None:
        """Does what the leading supervisor says.

        Args:
            message: ``mirror`` copies a state, ``expect`` is said to a host that is given back what
                another one has of it, ``give`` to that one.
        """
        number = message["life"]
        if message["kind"] == "expect":
            self.end()
            self._forget()
            self.claim = Claim(0, message["nodes"], message["node"])
            self._stage = _Stage(number, own=True)
            return
        self._sending.set()
        self._sending = ended = threading.Event()
        if message["kind"] == "give":
            kinds = [kind for kind in (GIVEN_BACK, COPIES) if message[_GIVEN[kind]]]
            args = number, message["to"], kinds, ended
            task = threading.Thread(target=self._give, args=args)
        else:
            pins = Pins(self._kept)
            safe = Stamp(message["safe_life"], message["safe_step"])
            wanted = Stamp(pins.life, message["step"])
            pins.set(safe if safe.step else None, wanted)
            # What is there already, and is not the last, may be on its way out.
            if any(step > wanted.step for step in self._newest(wanted.life)):
                self._tell("mirrored", life=number, step=wanted.step, outcome=MISSED)
                return
            task = threading.Thread(target=self._mirror, args=(number, wanted, ended))
        task.daemon = True
        task.start()

    def close(self) -> None:
        """Ends everything."""
        self.end()
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, self._read, self._wake):
            sock.close()

    def _forget(self) -> None:
        """Removes all states; nothing is under way."""
        with self._taking:
            for file in (*self._kept.glob("rank-*"), *self._held.glob("rank-*")):
                file.unlink()
        Pins.remove(self._kept)

    def _mirror(self, number: int, wanted: Stamp, ended: threading.Event) -> None:
        """Sends a state of all ranks here to the neighbour, once they have it."""
        try:
            files = self._kept_files(wanted, ended)
            if files:
                with self._passage(self._neighbour, number, COPIES, ended) as passage:
                    for file in files:
                        passage.send(file, wanted)
                self._warned = False
            outcome = WHOLE if files else MISSED
        except Ended:
            return
        except (Refused, *FAILURES) as error:
            outcome = FAILED
            self._warn_once(
                f"this host's state after {wanted.step} steps is not copied to its neighbour "
                f"{self._neighbour}: {_reason(error)}"
            )
        self._tell("mirrored", life=number, step=wanted.step, outcome=outcome)

    def _give(self, number: int, to: str, kinds: Sequence[int], ended: threading.Event) -> None:
        """Gives a host what was copied from the one in its place, or what that one had from here.

        Of what ranks have kept here these are the states that were copied.
        """
        pinned = set(self._pinned())
        try:
            for kind in kinds:
                with self._passage(to, number, kind, ended) as passage:
                    for file in sorted((self._folder / _GIVEN[kind]).glob("rank-*")):
                        for stamp in Slots(file).stamps():
                            if kind == GIVEN_BACK or stamp in pinned:
                                passage.send(file, stamp)
        except Ended:
            return
        except (Refused, *FAILURES) as error:
            self._warn(f"{to} is not given what was copied here: {_reason(error)}")
        self._tell("gave", life=number)

    def _kept_files(self, wanted: Stamp, ended: threading.Event) -> list[Path]:
        """Waits for the files in which all ranks of this host have a state; none if it is too late.

        Raises:
            Ended: The life has.
        """
        while not ended.is_set():
            found = self._states(wanted.life)
            if found and all(wanted in states for states in found):
                return [states[wanted] for states in found]
            over = [max(states, default=wanted) > wanted for states in found]
            if any(late and wanted not in states for late, states in zip(over, found)):
                return []
            time.sleep(_LOOK_SECONDS)
        raise Ended

    def _newest(self, mark: int) -> list[int]:
        """Returns the last step that each rank of this host has kept in this life; 0: none."""
        return [max((stamp.step for stamp in states), default=0) for states in self._states(mark)]

    def _states(self, mark: int) -> list[dict[Stamp, Path]]:
        """Returns what each rank of this host has kept in this life, and which file has it."""
        found = []
        for rank, _ in life.started(self._home):
            files = {}
            for file in self._kept.glob(f"rank-{rank}.*"):
                with contextlib.suppress(FileNotFoundError):  # the rank has just removed it
                    files.update(dict.fromkeys(Slots(file).stamps(), file))
            found.append({stamp: file for stamp, file in files.items() if stamp.life == mark})
        return found

    @contextmanager
    def _passage(
        self, to: str, number: int, what: int, ended: threading.Event
    ) -> Iterator[Passage]:
        """Connects to a host, which may not have heard yet which life it is."""
        host, _, port = to.rpartition(":")
        deadline = time.monotonic() + _CONNECT_SECONDS
        passage = None
        while passage is None:
            try:
                passage = Passage.to((host, int(port)), number, what, lambda: not ended.is_set())
            except FAILURES:
                if time.monotonic() > deadline:
                    raise
            if ended.wait(0.0 if passage else _AGAIN_SECONDS):
                raise Ended
        with self._noted(passage.sock):
            yield passage

    @contextmanager
    def _noted(self, sock: socket.socket) -> Iterator[None]:
        """Within it a connection can be ended from elsewhere; then it is closed."""
        self._connections.add(sock)
        try:
            yield
        finally:
            self._connections.discard(sock)
            sock.close()

    def _accept(self) -> None:
        """Takes what other hosts send, until the end of the process."""
        free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._over.wait(_AGAIN_SECONDS):
                    return
                continue
            if free.acquire(blocking=False):
                threading.Thread(target=self._take, args=(sock, free), daemon=True).start()
            else:
                sock.close()

    def _take(self, sock: socket.socket, free: threading.BoundedSemaphore) -> None:
        """Takes states from one connection."""
        stage = self._stage
        try:
            with self._noted(sock):
                passage = Passage.of(sock, stage.life, stage.goes_on)
                # One after another: two that write the same slot would make neither.
                with self._taking:
                    while stage.goes_on() and (file := self._taken(passage, stage)) is not None:
                        if passage.what == COPIES:
                            self._remove_others(file)
                        else:
                            self._pin(Slots(file).stamps())
        except (Ended, *FAILURES):
            return  # the end that sends finds out, and says so
        finally:
            free.release()

    def _taken(self, passage: Passage, stage: _Stage) -> Path | None:
        if passage.what == GIVEN_BACK and stage.own:
            return passage.take(self._kept, SLOTS_WITH_NEIGHBOUR, list)
        if passage.what == COPIES:
            return passage.take(self._held, SLOTS, self._pinned)
        raise Ended

    def _remove_others(self, file: Path) -> None:
        """Removes the copies of a rank in another form, unless all hosts have them."""
        pinned = set(self._pinned())
        for other in self._held.glob(f"{file.stem}.*"):
            if other != file and not pinned.intersection(Slots(other).stamps()):
                other.unlink()

    def _pin(self, stamps: Sequence[Stamp]) -> None:
        """Lets stay what was given back until there are newer copies: others rely on it too."""
        Pins(self._kept).set(stamps[0], stamps[-1])

    def _pinned(self) -> Collection[Stamp]:
        pins = Pins.of(self._kept)
        return [] if pins is None else pins.states

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"{text}\n  training goes on; after the loss of a host it would go back to the "
                "newest state that was copied, or checkpoint"
            )

    def _tell(self, kind: str, **fields: Any) -> None:
        self._news.append({"kind": kind, **fields})
        with contextlib.suppress(OSError):  # nobody listens any more
            self._wake.send(b"n")


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__
