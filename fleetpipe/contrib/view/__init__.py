"""Shows a run: ``fleetpipe watch``, ``fleetpipe report`` and ``fleetpipe why``.

A run leaves its board (``board.py``) and its history, the files of its folder (``run_folder.py``),
and a trace (``traced_ops.py``). ``answers.py`` answers the questions that a user has about a run;
``slow_ranks.py`` finds slow ranks while it runs, ``slowdown.py``
stragglers in a trace (the definitions are those of the what-if analysis of arXiv:2505.05713).
``showing`` has the pages, live or saved, the server, and the metrics for Prometheus.
``reporting.py`` runs on the first rank of a job and writes the board. Here is the address at which
a board is served; one that other hosts reach needs a token. No Paddle is needed.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
from typing import NamedTuple

from fleetpipe.errors import ConfigError

#: The environment variable with the token that a request from another host must show.
TOKEN = "FLEETPIPE_WATCH_TOKEN"
#: The environment variable with the address at which the first rank serves the job.
SERVE = "FLEETPIPE_SERVE"


class Address(NamedTuple):
    """The host and the port at which a job is served, or at which its page is read.

    Attributes:
        host: A name or an IP address.
        port: The port; 0 for any that is free.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, value: object) -> Address:
        """Reads PORT or HOST:PORT; the default host is 127.0.0.1."""
        host, _, port = str(value).rpartition(":")
        if isinstance(value, bool) or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                "a job is served at a port, or at HOST:PORT",
                got=repr(value),
                fix="give 9100, or 0.0.0.0:9100 for others too, who need a token",
            )
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self) -> str:
        """Returns the token that each request must contain; empty if requests need none.

        The token is the value of ``FLEETPIPE_WATCH_TOKEN``. If that is not set, an address that
        other hosts reach gets a random token, and a loopback address needs none.
        """
        chosen = os.environ.get(TOKEN, "")
        return chosen or ("" if self.is_loopback else secrets.token_urlsafe(16))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def configure_serve(parser: argparse.ArgumentParser) -> None:
    """Adds ``--serve`` to the parser of a command."""
    parser.add_argument(
        "--serve",
        type=_parse_serve_argument,
        metavar="[HOST:]PORT",
        help="serve the job as a page that updates by itself, with /metrics and /status.json",
    )


def _parse_serve_argument(text: str) -> Address:
    """Reads the value of ``--serve``; raises an error of argparse for any other text."""
    try:
        return Address.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"invalid: {text!r}; give 9100, or HOST:9100") from error
