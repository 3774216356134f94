"""Serves a board over HTTP: a page, ``/status.json``, and ``/metrics`` for Prometheus.

One thread answers all requests, and makes each text at most five times a second. A client that
sends or reads nothing for 3 s is dropped, and so is the oldest one if too many connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from email.message import Message
from email.parser import Parser
from http import HTTPStatus
from typing import cast
from urllib.parse import parse_qs, quote, urlsplit

from fleetpipe.arguments import using
from fleetpipe.contrib.view import TOKEN, Address
from fleetpipe.contrib.view.answers import status_of
from fleetpipe.contrib.view.board import PERIOD, JobBoard, RunRecord
from fleetpipe.contrib.view.showing.page import page
from fleetpipe.errors import ConfigError
from fleetpipe.extras import needed_for

#: The most open connections: their file descriptors are also the training's.
MOST_CONNECTIONS = 64
#: The seconds in which a client must send its request and read the answer.
PATIENCE = 3.0
_MOST_BYTES = 8192
#: The types of the pages; ``/board.json`` is what ``fleetpipe watch`` reads.
_KINDS = {
    "/": "text/html; charset=utf-8",
    "/status.json": "application/json",
    "/board.json": "application/json",
    "/metrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
_HEADERS = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\nConnection: close\r\n"
)

_STATES = ("starting", "running", "waiting", "stopped", "ended")
#: For each metric of the job: attribute of the board, name, unit and description.
_OF_JOB = (
    ("steps", "run_steps", "", "Steps of the whole run."),
    ("step_time", "step_time_seconds", "seconds", "Time of a step."),
    ("samples_per_second", "samples_per_second", "", "Of all replicas."),
    ("eta_seconds", "eta_seconds", "seconds", "Time to the end."),
    ("gradient_norm", "gradient_norm", "", "Of the last step, before clipping."),
)
#: For each metric of a rank: attribute of its record, name, unit and description.
_OF_RANK = (
    ("busy", "busy_ratio", "ratio", "Share of a step in which it computes."),
    ("memory", "memory_bytes", "bytes", "What it has."),
    ("memory_limit", "memory_limit_bytes", "bytes", "What it may have."),
    ("held", "held_forwards", "", "Most forwards that it held in a step."),
    ("held_cap", "held_cap_forwards", "", "Most that it may hold."),
    ("step_age", "last_step_age_seconds", "seconds", "Time since its last step."),
    ("incoming", "incoming_messages", "", "Messages that it has not taken."),
    ("outgoing", "outgoing_bytes", "bytes", "What it has not sent."),
)
#: The values of the labels of a figure, and the figure; None if it is unknown.
_Sample = tuple[tuple[str, ...], "float | None"]


class Server:
    """Serves the state of a job over HTTP, from a thread, until it is closed.

    Attributes:
        url: The address of the page, with the token if it needs one.
    """

    def __init__(self, address: Address, board: Callable[[], JobBoard]) -> None:
        """Starts the thread that serves.

        Args:
            address: The address to serve at.
            board: Returns the current state of the job; called at most five times a second.

        Raises:
            ConfigError: The address cannot be used.
            PackageNotFound: prometheus-client is not installed.
        """
        with needed_for("serving the board of a job"):
            from prometheus_client.openmetrics.exposition import generate_latest
        self._write_metrics: Callable[[object], bytes] = generate_latest
        self._board = board
        self._token = address.token()
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            with using("--serve", str(address), "a port that is free"):
                serving = asyncio.start_server(
                    self._serve, address.host, address.port, limit=_MOST_BYTES, backlog=64
                )
                self._server = self._loop.run_until_complete(serving)
        except BaseException:
            self._loop.close()
            raise
        port = self._server.sockets[0].getsockname()[1]
        token = f"/?token={quote(self._token, safe='')}" if self._token else "/"
        # A browser takes no wildcard address.
        host = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
        self.url = f"http://{Address(host, port)}{token}"
        self._thread = threading.Thread(target=self._run_loop, name="fleetpipe-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        """Answers requests until the loop is stopped, then drops all connections."""
        try:
            self._loop.run_forever()
        finally:
            self._server.close()
            tasks = list(self._open)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the request of a connection; drops the oldest one if too many are open."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        if len(self._open) >= MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        dropped = (OSError, ValueError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError)
        try:
            with contextlib.suppress(*dropped, asyncio.CancelledError):
                await asyncio.wait_for(self._answer(reader, writer), PATIENCE)
        finally:
            self._open.pop(task, None)
            # An answer that the client has not read by now is dropped.
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads a request and writes the answer."""
        head = await reader.readuntil(b"\r\n\r\n")
        request, _, lines = head.decode("latin-1").partition("\r\n")
        method, target, *_ = [*request.split(), "", ""]
        status, kind, body = self._respond(method, target, Parser().parsestr(lines))
        more = 'WWW-Authenticate: Bearer realm="fleetpipe"\r\n' if status == 401 else ""
        writer.write(
            f"HTTP/1.1 {status:d} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\n{more}{_HEADERS}\r\n".encode()
        )
        writer.write(b"" if method == "HEAD" else body)
        await writer.drain()

    def _respond(self, method: str, target: str, headers: Message) -> tuple[int, str, bytes]:
        """Returns the status code, the type and the body of an answer."""
        parts = urlsplit(target)
        # Against DNS rebinding: a web page may give its own name this host's address.
        host = urlsplit(f"//{headers.get('Host', 'localhost')}").hostname or ""
        if not self._token and not Address(host, 0).is_loopback:
            return _refusal(421, f"this job is shown as localhost; by other names with a {TOKEN}")
        if self._token:
            shown = parse_qs(parts.query).get("token", [""])[0]
            shown = headers.get("Authorization", "").removeprefix("Bearer ") or shown
            if not hmac.compare_digest(shown.encode(), self._token.encode()):
                return _refusal(403 if shown else 401, "this job is shown to those with its token")
        if method not in ("GET", "HEAD"):
            return _refusal(405, "only GET")
        if parts.path not in _KINDS:
            return _refusal(404, "there are /, /status.json and /metrics")
        try:
            return 200, _KINDS[parts.path], self._cached_text(parts.path)
        except ConfigError as error:
            return _refusal(503, str(error))

    def _cached_text(self, path: str) -> bytes:
        """Returns the text at a path of the URL, made again if it is older than ``PERIOD``."""
        made, body = self._texts.get(path, (-PERIOD, b""))
        if time.monotonic() - made < PERIOD:
            return body
        board = self._board()
        if path == "/metrics":
            body = self._write_metrics(_Metrics(board))
        elif path == "/":
            body = page(RunRecord("job", board), live=True).encode()
        else:
            content = (
                status_of(board)
                if path == "/status.json"
                else {**board.content(), "history": board.history.content()}
            )
            body = json.dumps(content).encode() + b"\n"
        self._texts[path] = time.monotonic(), body
        return body


def _refusal(code: int, text: str) -> tuple[int, str, bytes]:
    """Returns the answer with an error code and its reason."""
    return code, "text/plain; charset=utf-8", f"{text}\n".encode()


class _Metrics:
    """The metrics of a job, as a registry of prometheus-client gives them."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import CounterMetricFamily

        board, ranks = self._board, [(str(rank.rank), rank) for rank in self._board.ranks]
        yield CounterMetricFamily("fleetpipe_steps", "Steps that are done.", board.step)
        restarts = "How often the job was started again."
        yield CounterMetricFamily("fleetpipe_restarts", restarts, board.restarts)
        for attribute, name, unit, description in _OF_JOB:
            yield _make_gauge(name, description, [((), getattr(board, attribute))], (), unit)
        if board.last_checkpoint is not None:
            step, age = board.last_checkpoint.step, board.last_checkpoint.age
            yield _make_gauge("last_checkpoint_step", "Step that was saved.", [((), step)])
            name = "last_checkpoint_age_seconds"
            yield _make_gauge(name, "Time since.", [((), age)], (), "seconds")
        for attribute, name, unit, description in _OF_RANK:
            samples = [((number,), getattr(rank, attribute)) for number, rank in ranks]
            yield _make_gauge(f"rank_{name}", description, samples, ("rank",), unit)
        parts = [((part,), share) for part, share in board.shares.items()]
        description = "Share of wall time that a mean rank spends so."
        yield _make_gauge("time_share_ratio", description, parts, ("part",), "ratio")
        states = [((n, s), float(rank.state == s)) for n, rank in ranks for s in _STATES]
        yield _make_gauge("rank_state", "1 for what a rank does.", states, ("rank", "state"))
        slow = [((str(rank.rank), rank.what), rank.factor) for rank in board.slow]
        yield _make_gauge("slow_factor", "How many times as long it takes.", slow, ("rank", "what"))


def _make_gauge(
    name: str, text: str, samples: Iterable[_Sample], labels: tuple[str, ...] = (), unit: str = ""
) -> object:
    """Returns a metric of prometheus-client.

    Args:
        name: Its name without the prefix ``fleetpipe_``.
        text: What it tells.
        samples: The values of its labels with its figure, which is left out if it is None.
        labels: The names of its labels.
        unit: Its unit, with which its name ends; empty for none.
    """
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"fleetpipe_{name}", text, labels=labels, unit=unit)
    for values, figure in samples:
        if figure is not None:
            family.add_metric(values, figure)
    return family
