"""The connection between two supervisors: authenticated, sealed where there is a secret, alive.

Each end says so once a second; one that has said nothing for :data:`LOST_SECONDS` is lost, as is
one whose connection has ended.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from fleetpipe.errors import TransportError
from fleetpipe.job.watching import news
from fleetpipe.transport.joining import handshake
from fleetpipe.transport.joining.handshake import Known
from fleetpipe.transport.wire.parsing import parse

#: Seconds after which a silent supervisor is taken for lost.
LOST_SECONDS = 10.0
#: Seconds between two signs of life.
ALIVE_SECONDS = 1.0
_NAMESPACE = "fleetpipe launch"
#: The sides as ranks of a handshake: who leads, and who follows.
LEADER, FOLLOWER, SIDES = 0, 1, 2

#: A message, as an object of JSON.
Message = dict[str, Any]
#: The fields of each kind of message, and their types.
_FIELDS: dict[str, dict[str, type]] = {
    "alive": {},
    "here": {"address": str, "port": int, "life": int, "nodes": int, "node": int},
    "begin": {
        "life": int,
        "nodes": int,
        "node": int,
        "master": str,
        "mark": int,
        "neighbour": str,
    },
    "expect": {"life": int, "nodes": int, "node": int},
    "give": {"life": int, "to": str, "held": bool, "kept": bool},
    "gave": {"life": int},
    "mirror": {"life": int, "step": int, "safe_life": int, "safe_step": int},
    "mirrored": {"life": int, "step": int, "outcome": str},
    "ended": {"life": int, "verdict": str},
    "asked": {"number": int},
    "stop": {},
    "kill": {},
    "over": {"code": int},
}


def secret() -> bytes:
    """Returns what both ends know: what the user gave the ranks as their secret, if anything.

    Raises:
        ConfigError: The secret cannot be used.
    """
    return handshake.secret_of_run(handshake.user_secret(), _NAMESPACE, "")


class Link:
    """One end of a connection to another supervisor."""

    def __init__(self, sock: socket.socket, known: Known) -> None:
        """Takes over a connected socket, after the handshake."""
        sock.setblocking(False)
        self._sock = sock
        seals = known.seals if handshake.user_secret() else None
        self._outgoing = None if seals is None else seals.outgoing
        self._incoming = None if seals is None else seals.incoming
        self._received = bytearray()
        self._unsent = bytearray()
        self._heard = self._told = time.monotonic()
        self._ended = False

    @property
    def lost(self) -> bool:
        """Whether nothing more comes from the other end."""
        return self._ended or time.monotonic() - self._heard > LOST_SECONDS

    def fileno(self) -> int:
        """Returns the descriptor that can be read when something has come."""
        return self._sock.fileno()

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends a message, without waiting where the other end does not read."""
        self._unsent += news.pack({"kind": kind, **fields}, self._outgoing)
        self._told = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            try:
                sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
            except ConnectionError:
                self._ended = True

    def say_alive(self) -> None:
        """Gives the sign of life, where it is due."""
        if time.monotonic() - self._told >= ALIVE_SECONDS:
            self.tell("alive")

    def hear(self) -> Iterator[Message]:
        """Yields the messages that have come; what is none ends the connection."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            self._ended = not data
            self._received += data
        try:
            for text in news.texts(self._received, self._incoming):
                self._heard = time.monotonic()
                yield _checked(parse(text, 1, 1, 16))
        except (ValueError, TransportError):
            self._ended = True

    def close(self) -> None:
        """Ends the connection; what was sent is still delivered."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._sock.close()


def _checked(message: Any) -> Message:
    kind = message.get("kind") if isinstance(message, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or message.keys() != {"kind", *fields}:
        raise ValueError("a message of no kind that is known")
    if any(type(message[name]) is not type_ for name, type_ in fields.items()):
        raise ValueError("fields of other types")
    return dict(message)
