"""A supervisor that does what the leading one says, with the ranks of its own host."""

from __future__ import annotations

import argparse
import contextlib
import selectors
import socket
import time

from fleetpipe.errors import TransportError
from fleetpipe.launch.keeping.copies import TO_COPIES, Copies
from fleetpipe.launch.script import in_a_shell
from fleetpipe.launch.supervisor import link as links
from fleetpipe.launch.supervisor.link import Link, Message
from fleetpipe.launch.supervisor.local import Local, Place
from fleetpipe.launch.supervisor.saying import say
from fleetpipe.launch.supervisor.signals import Signals
from fleetpipe.transport.joining.handshake import Stranger, connects
from fleetpipe.transport.joining.mesh import Attempt

_TURN_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_CONNECT_SECONDS = 5.0


class Follower:
    """One host's part in a job that another one leads."""

    def __init__(
        self,
        options: argparse.Namespace,
        local: Local,
        signals: Signals,
        address: str,
        copies: Copies | None = None,
    ) -> None:
        """Follows.

        Args:
            options: Of the command.
            local: This host's ranks.
            signals: What asks the job to stop.
            address: Of this host.
            copies: This host's part in the copies of states; None where there are none.
        """
        self._options = options
        self._local = local
        self._signals = signals
        self._address = address
        self._copies = copies
        self._life = 0
        self._code: int | None = None
        self._stopped_by: int | None = None

    def run(self) -> int:
        """Takes part until the job is over; returns its exit code.

        Raises:
            TransportError: The leading supervisor is not there, or not there again, in time.
        """
        while True:
            link = self._connect()
            if link is None:
                return in_a_shell(-(self._stopped_by or 0))
            try:
                self._follow(link)
            finally:
                link.close()
            if self._code is not None:
                return self._code
            say("the leading host is lost: its ranks' work ends here, until it is back")
            self._end_life()

    def _connect(self) -> Link | None:
        """Connects to the leader, and says where this host is; None where this host is to stop.

        Raises:
            TransportError: It is not there in time.
        """
        deadline = time.monotonic() + self._options.elastic_timeout
        found = "nothing"
        while time.monotonic() < deadline:
            for number in self._signals.take():
                self._stopped_by = number
                return None
            try:
                link = _dialled(self._options.master)
                port = 0 if self._copies is None else self._copies.port
                claim = self._local.claim
                link.tell("here", address=self._address, port=port, **claim._asdict())
                return link
            except (OSError, Stranger) as error:
                found = str(error)
            time.sleep(_AGAIN_SECONDS)
        host, port = self._options.master
        raise TransportError(
            f"no supervisor leads at {host}:{port}",
            expected=f"fleetpipe launch --master {host}:{port} on the host with this address",
            got=found,
            cause="it was not started or has ended, a firewall, or another FLEETPIPE_SECRET",
            fix="start it there, with the same --master and secret",
        )

    def _follow(self, link: Link) -> None:
        """Does what the leader says until the job is over, or the leader is lost."""
        with selectors.DefaultSelector() as selector:
            for each in (link, self._signals, self._copies):
                if each is not None:
                    selector.register(each, selectors.EVENT_READ, each)
            while not link.lost and self._code is None:
                # Each life may have another process that starts it.
                if self._local.running and self._local not in selector.get_map():
                    selector.register(self._local, selectors.EVENT_READ, self._local)
                for key, _ in selector.select(_TURN_SECONDS):
                    if key.data is link:
                        for message in link.hear():
                            self._obey(message)
                    elif key.data is self._signals:
                        for number in self._signals.take():
                            link.tell("asked", number=number)
                    elif self._copies is not None and key.data is self._copies:
                        for news in self._copies.news():
                            link.tell(**news)
                    else:
                        selector.unregister(self._local)
                        link.tell("ended", life=self._life, verdict=str(self._local.end()))
                link.say_alive()

    def _obey(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "begin":
            self._life = message["life"]
            fields = {name: message[name] for name in Place._fields}
            self._local.start(Place(**fields))
        elif kind == "stop":
            self._local.stop()
        elif kind == "kill":
            self._local.kill()
        elif kind == "over":
            self._code = message["code"]
        elif self._copies is not None and kind in TO_COPIES:
            self._copies.obey(message)

    def _end_life(self) -> None:
        if self._local.running:
            self._local.kill()
            self._local.end()


def _dialled(where: tuple[str, int]) -> Link:
    """Connects to a supervisor that leads.

    Raises:
        OSError: Nobody listens there, or does not answer in time.
        Stranger: It does not know the secret.
    """
    sock = socket.create_connection(where, _CONNECT_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        exchange = connects(links.secret(), links.FOLLOWER, links.LEADER, links.SIDES)
        attempt = Attempt(sock, exchange)
        known = attempt.advance()
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while known is None:
                if not selector.select(max(0.0, attempt.expires - time.monotonic())):
                    raise TimeoutError("it does not answer")
                known = attempt.advance()
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return Link(sock, known)
