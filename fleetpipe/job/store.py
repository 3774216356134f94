"""A client of Paddle's ``TCPStore`` whose every call ends within a limit.

Paddle's own client waits without a limit while it holds the interpreter's lock. Its server, in
threads of C++, is used unchanged. A request is a command (int32) and its arguments, strings with
their length (uint64) before them; the protocol is the same in 2.6.2 and 3.3.1.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import NoReturn

from fleetpipe.errors import PeerFailed, PipelineTimeout, TransportError
from fleetpipe.transport.limit import Limit

_ADD, _GET, _SET = 0, 1, 3
_COMMAND = struct.Struct("<i")
_NUMBER = struct.Struct("<q")
#: Seconds between two looks at whether a rank has failed.
_CHECK_SECONDS = 0.2
_LARGEST_VALUE = 1 << 26


def _string(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


class JobStore:
    """One rank's connection to the job's store. Used by one thread at a time.

    Attributes:
        check: Called during waits; raises an error if a rank is known to have failed.
        timeout: Seconds that the answer to one request may take.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        """Connects to the server at a host and port.

        Args:
            host: The host on which it listens.
            port: Its port.
            timeout: Seconds that the answer to one request may take.

        Raises:
            OSError: Nothing listens there.
        """
        self.check: Callable[[], None] = lambda: None
        self.timeout = timeout
        self._sock = socket.create_connection((host, port), timeout=timeout)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.settimeout(_CHECK_SECONDS)

    def set(self, key: str, value: str) -> None:
        """Stores ``value`` under ``key``."""
        self._send(_SET, key, _string(value.encode()))

    def get(self, key: str) -> bytes:
        """Returns the value of ``key``, which must be there."""
        self._send(_GET, key)
        (size,) = _NUMBER.unpack(self._receive(_NUMBER.size))
        if not 0 <= size <= _LARGEST_VALUE:
            raise TransportError(
                "the job's store answers with a value of an absurd size",
                where=f"key {key!r}",
                expected=f"at most {_LARGEST_VALUE} bytes",
                got=str(size),
                cause="another program has the port of rank 0, or wrote into the store",
                fix="launch again; with another --master HOST:PORT if that happens twice",
            )
        return self._receive(size)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that begins at 0 and returns its new value."""
        self._send(_ADD, key, _NUMBER.pack(amount))
        value: int = _NUMBER.unpack(self._receive(_NUMBER.size))[0]
        if value == 0:
            self.check()
        return value

    def close(self) -> None:
        """Ends the connection."""
        self._sock.close()

    def _send(self, command: int, key: str, arguments: bytes = b"") -> None:
        try:
            # Paddle's own clients put a stroke before each key.
            self._sock.sendall(_COMMAND.pack(command) + _string(b"/" + key.encode()) + arguments)
        except OSError as error:
            self._raise_gone(error.strerror or str(error))

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        limit = Limit(self.timeout)
        while len(data) < size:
            try:
                more = self._sock.recv(size - len(data))
            except TimeoutError:
                self._wait_on(limit)
                continue
            except OSError as error:
                self._raise_gone(error.strerror or str(error))
            if not more:
                self._raise_gone("it closed the connection")
            data += more
        return bytes(data)

    def _wait_on(self, limit: Limit) -> None:
        self.check()
        if limit.reached():
            raise PipelineTimeout(
                f"the job's store, which rank 0 serves, did not answer for {self.timeout:g} s",
                cause="rank 0 is stopped, or its host or network is gone; or another program has "
                "the port of rank 0",
                fix="read the log of rank 0",
            )

    def _raise_gone(self, why: str) -> NoReturn:
        self.check()
        raise PeerFailed(
            "rank 0, which serves the job's store, is gone",
            got=why,
            fix="read the log of rank 0: it failed first",
        )
