"""Where the supervisors of other hosts come to; whoever else knocks holds up none of them."""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from typing import Callable

from fleetpipe.launch.supervisor import link as links
from fleetpipe.launch.supervisor.link import Link
from fleetpipe.transport.joining.handshake import Stranger, accepts
from fleetpipe.transport.joining.mesh import MOST_STRANGERS, Attempt


class Door:
    """Lets in who knows the secret."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        let_in: Callable[[Link], None],
    ) -> None:
        """Opens.

        Args:
            listener: Where they come to.
            selector: Calls what it has for a socket that can be read.
            let_in: Called with the connection of each.
        """
        self._listener = listener
        self._selector = selector
        self._let_in = let_in
        self._strangers: list[Attempt] = []
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def drop_late(self) -> None:
        """Sends those away who have not proved in time who they are."""
        now = time.monotonic()
        for stranger in [one for one in self._strangers if one.expires < now]:
            self._drop(stranger)

    def _accept(self) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._drop(self._strangers[0])
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            attempt = Attempt(sock, accepts(links.secret(), links.LEADER, links.SIDES))
            self._strangers.append(attempt)
            greet = functools.partial(self._greet, attempt)
            self._selector.register(sock, selectors.EVENT_READ, greet)

    def _greet(self, attempt: Attempt) -> None:
        try:
            known = attempt.advance()
        except (OSError, Stranger):
            self._drop(attempt)
            return
        if known is not None:
            self._strangers.remove(attempt)
            self._selector.unregister(attempt.sock)
            self._let_in(Link(attempt.sock, known))

    def _drop(self, attempt: Attempt) -> None:
        self._strangers.remove(attempt)
        self._selector.unregister(attempt.sock)
        attempt.sock.close()
