"""How one host gives another one a state: a file of slots is described, then one slot is sent.

The end that connects sends, each of both proves first that it knows the job's secret, and where the
user gave one every part has a seal. For each state::

    sends -> takes    state: name of the file, what it is made of, which state, bytes of the text
    takes -> sends    ready, or why not
    sends -> takes    the bytes of the slot
    sends -> takes    whole: the slot has not changed meanwhile
    takes -> sends    taken

All waits end after :data:`SILENT_SECONDS` in which nothing moves, that for ``ready`` later.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any, Callable

from fleetpipe.errors import CheckpointError, TransportError
from fleetpipe.job.watching import news
from fleetpipe.launch.keeping.slots import Form, Slots, Stamp
from fleetpipe.transport.joining import handshake
from fleetpipe.transport.joining.handshake import Exchange, Known, Stranger, accepts, connects
from fleetpipe.transport.wire.parsing import parse
from fleetpipe.transport.wire.seal import SEAL_BYTES

#: Seconds after which a connection on which nothing moves is given up.
SILENT_SECONDS = 10.0
_NAMESPACE = "fleetpipe launch copies"
#: The sides as ranks of a handshake: who takes, and who sends.
_TAKES, _SENDS, _SIDES = 0, 1, 2
#: What a connection is for: to copy states to a neighbour, or to give it back its own.
COPIES, GIVEN_BACK = 0, 1
_STREAMS = 2
#: Seconds in which the other end makes room in its memory for a state.
_ROOM_SECONDS = 300.0
#: Bytes that are sealed together, and between which a transfer can be stopped.
_PART_BYTES = 1 << 20
_NAME = re.compile(r"rank-\d{1,9}\.\d{1,9}")
_FIELDS: dict[str, dict[str, type]] = {
    "state": {
        "file": str,
        "about": int,
        "text_bytes": int,
        "value_bytes": int,
        "life": int,
        "step": int,
        "text": int,
    },
    "ready": {"error": str},
    "whole": {},
    "taken": {},
}
_MOST_ABOUT = 1 << 28


#: Whether a transfer is to go on.
GoesOn = Callable[[], bool]


class Refused(Exception):
    """The other end does not take a state, and says why."""


class Ended(Exception):
    """What the transfer was for has ended."""


class Passage:
    """A connection between two hosts, of which one sends states and the other takes them."""

    def __init__(self, sock: socket.socket, known: Known, goes_on: GoesOn) -> None:
        """Takes over a connected socket, after the handshake.

        Args:
            sock: The socket, with its limit of time.
            known: What the handshake found.
            goes_on: Asked between two parts; a transfer that is not to go on ends.
        """
        self.sock = sock
        #: What the states are, :data:`COPIES` or :data:`GIVEN_BACK`.
        self.what = known.stream
        sealed = bool(handshake.user_secret())
        self._outgoing = known.seals.outgoing if sealed else None
        self._incoming = known.seals.incoming if sealed else None
        self._goes_on = goes_on
        self._received = bytearray()

    @classmethod
    def to(cls, address: tuple[str, int], life: int, what: int, goes_on: GoesOn) -> Passage:
        """Connects to a host that takes states, as the one that sends.

        Args:
            address: Where it listens.
            life: Of the job.
            what: What is sent, :data:`COPIES` or :data:`GIVEN_BACK`.
            goes_on: See :class:`Passage`.

        Raises:
            OSError: It cannot be reached.
            Stranger: It is of another job, or of another life.
        """
        exchange = connects(_secret(), _SENDS, _TAKES, _SIDES, what, life)
        return cls._greeted(socket.create_connection(address, SILENT_SECONDS), exchange, goes_on)

    @classmethod
    def of(cls, sock: socket.socket, life: int, goes_on: GoesOn) -> Passage:
        """Accepts who has connected, as the one that takes; as :meth:`to`."""
        sock.settimeout(SILENT_SECONDS)
        return cls._greeted(sock, accepts(_secret(), _TAKES, _SIDES, _STREAMS, life), goes_on)

    @classmethod
    def _greeted(cls, sock: socket.socket, exchange: Exchange, goes_on: GoesOn) -> Passage:
        try:
            step = next(exchange)
            while True:
                if isinstance(step, bytes):
                    sock.sendall(step)
                    step = next(exchange)
                else:
                    said = bytearray(step)
                    _receive(sock, memoryview(said))
                    step = exchange.send(bytes(said))
        except StopIteration as end:
            return cls(sock, end.value, goes_on)
        except BaseException:
            sock.close()
            raise

    def send(self, file: Path, stamp: Stamp) -> None:
        """Sends a state; returns when the other end has it whole.

        Args:
            file: A file of slots that has it.
            stamp: Which one.

        Raises:
            Ended: See :class:`Passage`; or the state is not there any more.
            Refused: The other end does not take it.
            OSError: The connection is lost, or nothing moves on it.
        """
        slots = Slots(file)
        slot = slots.slot_of(stamp)
        if slot is None:
            raise Ended
        form = slots.form
        self._tell(
            "state",
            file=file.name,
            about=len(form.about),
            text_bytes=form.text_bytes,
            value_bytes=form.value_bytes,
            text=len(slots.text_of(slot)),
            **stamp._asdict(),
        )
        self._send_parts(memoryview(form.about))
        self.sock.settimeout(_ROOM_SECONDS)
        if error := self._hear("ready")["error"]:
            raise Refused(error)
        self.sock.settimeout(SILENT_SECONDS)
        self._send_parts(slots.contents(slot))
        if slots.slot_of(stamp) != slot:
            raise Ended
        self._tell("whole")
        self._hear("taken")

    def take(
        self, folder: Path, slots: int, pinned: Callable[[], Collection[Stamp]]
    ) -> Path | None:
        """Takes the next state; returns its file, or None where there is none.

        Args:
            folder: Where its file is, or is made.
            slots: How many states a file takes that is made.
            pinned: Returns what may not go for it.

        Raises:
            Ended: See :class:`Passage`; or there is no memory for it, which the other end is told.
            OSError: The connection is lost, or nothing moves on it.
            ValueError: The other end sends something else.
        """
        try:
            told = self._hear("state")
        except EOFError:
            return None
        numbers = [value for value in told.values() if isinstance(value, int)]
        if not _NAME.fullmatch(told["file"]) or min(numbers) < 0 or told["about"] > _MOST_ABOUT:
            raise ValueError("no file of a state")
        about = bytearray(told["about"])
        self._take_parts(memoryview(about))
        form = Form(bytes(about), told["text_bytes"], told["value_bytes"], slots)
        file = folder / str(told["file"])
        try:
            taken = _opened(file, form)
        except (CheckpointError, OSError) as error:
            self._tell("ready", error=str(error))
            raise Ended from error
        if told["text"] > taken.form.text_bytes:
            raise ValueError("a text without room for it")
        slot = taken.begin(pinned())
        self._tell("ready", error="")
        self._take_parts(taken.contents(slot))
        self._hear("whole")
        taken.end(slot, Stamp(told["life"], told["step"]), told["text"])
        self._tell("taken")
        return file

    def _tell(self, kind: str, **fields: Any) -> None:
        self.sock.sendall(news.pack({"kind": kind, **fields}, self._outgoing))

    def _hear(self, kind: str) -> dict[str, Any]:
        # No more than the message is read: what follows it goes where it belongs.
        while True:
            for text in news.texts(self._received, self._incoming):
                return _checked(parse(text, 1, 1, 16), kind)
            byte = self.sock.recv(1)
            if not byte:
                raise EOFError("the other end is gone")
            self._received += byte

    def _send_parts(self, memory: memoryview) -> None:
        for start in range(0, len(memory), _PART_BYTES):
            part = memory[start : start + _PART_BYTES]
            self._check()
            self.sock.sendall(part)
            if self._outgoing is not None:
                self.sock.sendall(self._outgoing.of([part]))

    def _take_parts(self, memory: memoryview) -> None:
        seal = bytearray(SEAL_BYTES)
        for start in range(0, len(memory), _PART_BYTES):
            part = memory[start : start + _PART_BYTES]
            self._check()
            _receive(self.sock, part)
            if self._incoming is not None:
                _receive(self.sock, memoryview(seal))
                self._incoming.check([part], seal)

    def _check(self) -> None:
        if not self._goes_on():
            raise Ended


def _secret() -> bytes:
    return handshake.secret_of_run(handshake.user_secret(), _NAMESPACE, "")


def _receive(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        count = sock.recv_into(memory)
        if not count:
            raise Stranger("it closed the connection")
        memory = memory[count:]


def _opened(file: Path, form: Form) -> Slots:
    """Returns a file of this form: the one that is there, or a new one."""
    with contextlib.suppress(FileNotFoundError):
        slots = Slots(file)
        if slots.form == form:
            return slots
        file.unlink()  # the memory of both would not have to fit
    return Slots.create(file, form)


def _checked(message: Any, kind: str) -> dict[str, Any]:
    fields = _FIELDS[kind]
    if not isinstance(message, dict) or message.get("kind") != kind:
        raise ValueError(f"no message {kind!r}")
    if message.keys() != {"kind", *fields}:
        raise ValueError("other fields than those of its kind")
    if any(type(message[name]) is not type_ for name, type_ in fields.items()):
        raise ValueError("fields of other types")
    return message


#: What goes wrong with a connection to another host, whoever is to blame.
FAILURES = (OSError, EOFError, Stranger, ValueError, TransportError)
