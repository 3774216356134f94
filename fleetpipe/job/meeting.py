"""Starts a job: opens its key-value store, waits for all ranks, compares their settings.

Paddle's own start waits without a limit for a rank that never comes, and does not say which one.
Here the wait has the user's limit, and its error names the missing ranks. Every call of
``JobStore`` has a limit too; Paddle's client waits without one while it holds the interpreter's
lock. Paddle's server is used unchanged: a request is a command (int32) and its arguments, strings
with their length (uint64) before them; the protocol is the same in 2.6.2 and 3.3.1.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from fleetpipe import log, numerics
from fleetpipe.errors import (
    ConfigError,
    FleetPipeError,
    PeerFailed,
    PipelineTimeout,
    StateError,
    TransportError,
)
from fleetpipe.job import attempt_files
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import began_without_groups, open_tcp_store
from fleetpipe.transport import Store
from fleetpipe.transport.base import Limit, await_keys
from fleetpipe.version import __version__

#: The commands of Paddle's store that a request may have, and how its numbers are encoded.
_ADD, _GET, _SET = 0, 1, 3
_COMMAND = struct.Struct("<i")
_NUMBER = struct.Struct("<q")
#: Seconds between two looks at whether a rank has failed.
_CHECK_SECONDS = 0.2
#: The most bytes of a value that is read.
_LARGEST_VALUE = 1 << 26

#: Seconds between two polls of the store.
_POLL_SECONDS = 0.02
#: Seconds that rank 0, which serves the store, waits for other ranks that still use it.
_LAST_SECONDS = 3.0
#: Seconds in which a program that listens at rank 0's endpoint answers, if it is a store.
_ANSWER_SECONDS = 2.0

#: Returns the rank of this process in the job.
own_rank = log.own_rank

#: The open store of this process's jobs, if there is one.
_stores: list[JobStore] = []

#: Paddle's server of the store, on rank 0; it ends with its object.
_servers: list[Any] = []

#: The purpose of the meetings of :func:`require_agreement`, for messages.
_COMPARISON = "the comparison of what each rank runs"
#: The most differences between ranks that a message shows; the first ones tell enough.
_MOST_SHOWN = 4


def _encode_string(data: bytes) -> bytes:
    """Returns a string of the store's protocol: its length, then its bytes."""
    return _NUMBER.pack(len(data)) + data


class JobStore:
    """Reads and writes the job's key-value store for one rank. Used by one thread at a time.

    Attributes:
        check: Called during waits; raises an error if a rank is known to have failed.
        timeout: Seconds that the server may take to answer one request.
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
        self._send(_SET, key, _encode_string(value.encode()))

    def get(self, key: str) -> bytes:
        """Returns the value of ``key``, which must be there: the server waits for a missing key."""
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
        """Adds ``amount`` to the counter ``key``, which begins at 0; returns the sum.

        If the sum is 0, so that a rank is still missing, it also calls ``check``.
        """
        self._send(_ADD, key, _NUMBER.pack(amount))
        value: int = _NUMBER.unpack(self._receive(_NUMBER.size))[0]
        if value == 0:
            self.check()
        return value

    def close(self) -> None:
        """Ends the connection."""
        self._sock.close()

    def _send(self, command: int, key: str, arguments: bytes = b"") -> None:
        """Sends a request: a command, a key and further arguments."""
        try:
            # Paddle's own clients put a stroke before each key.
            encoded_key = _encode_string(b"/" + key.encode())
            self._sock.sendall(_COMMAND.pack(command) + encoded_key + arguments)
        except OSError as error:
            self._raise_gone(error.strerror or str(error))

    def _receive(self, size: int) -> bytes:
        """Receives ``size`` bytes of an answer within the limit."""
        data = bytearray()
        limit = Limit(self.timeout)
        while len(data) < size:
            try:
                more = self._sock.recv(size - len(data))
            except TimeoutError:
                self.check()
                if not limit.reached():
                    continue
                raise PipelineTimeout(
                    f"the job's store, which rank 0 serves, did not answer for {self.timeout:g} s",
                    cause="rank 0 is stopped, or its host or network is gone; or another program "
                    "has the port of rank 0",
                    fix="read the log of rank 0",
                ) from None
            except OSError as error:
                self._raise_gone(error.strerror or str(error))
            if not more:
                self._raise_gone("it closed the connection")
            data += more
        return bytes(data)

    def _raise_gone(self, why: str) -> NoReturn:
        """Raises the error that rank 0 is gone, or that of the rank whose failure caused it."""
        self.check()
        raise PeerFailed(
            "rank 0, which serves the job's store, is gone",
            got=why,
            fix="read the log of rank 0: it failed first",
        )


def world_size() -> int:
    """Returns the number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def come_together(number: int, timeout: float) -> JobStore:
    """Opens the job's store, and waits until every rank has done so. Collective over the job.

    Args:
        number: Number of earlier jobs of these processes; it makes the keys unique.
        timeout: Seconds to wait for the other ranks, and for each later answer of the store.

    Returns:
        The store that all jobs of this process share, opened by the first of them: rank 0 cannot
        serve a second one at its endpoint.

    Raises:
        PipelineTimeout: Names the ranks that did not come.
        FleetPipeError: An error of :func:`open_store`.
    """
    store = opened_store(timeout)
    store.timeout = timeout
    # The store may still have the check of an earlier job, whose ranks may have failed.
    store.check = lambda: None
    meet(store, f"fleetpipe/{number}/here", timeout)
    return store


def open_store_again(timeout: float, check: Callable[[], None]) -> JobStore:
    """Opens the job's store again, after another process has become rank 0 and serves it."""
    for store in _stores:
        store.close()
    _stores.clear()
    _stores.append(open_store(timeout, check))
    return _stores[0]


def opened_store(timeout: float) -> JobStore:
    """Returns the store of this process's jobs; opens it at the first call."""
    if not _stores:
        _stores.append(open_store(timeout))
    return _stores[0]


def open_store(timeout: float, check: Callable[[], None] = lambda: None) -> JobStore:
    """Opens the job's store, which rank 0 serves at its own endpoint. Collective over the job.

    Args:
        timeout: Seconds to wait for rank 0.
        check: Called meanwhile; raises an error to end the wait.

    Raises:
        ConfigError: The launcher gave rank 0 an address of IPv6, which Paddle's store cannot serve.
        PipelineTimeout: Rank 0 did not come.
        StateError: Paddle has opened a store of its own at that endpoint.
        TransportError: The port that the launcher gave to rank 0 is taken; or the job has been
            restarted, and this rank belongs to the earlier start.
    """
    host, port = _store_address()
    _refuse_paddles_store()
    # The port may by now serve another job.
    sign = hashlib.sha256(os.environ["PADDLE_TRAINER_ENDPOINTS"].encode()).hexdigest()
    return _connect_to_store(host, port, timeout, f"fleetpipe/job/{sign}", check)


def paddles_client(timeout: float) -> Any:
    """Returns a client of the job's open store for Paddle's own functions."""
    return _servers[0] if _servers else open_tcp_store(*_store_address(), False, timeout)


def _store_address() -> tuple[str, int]:
    """Returns host and port of the job's store: those of rank 0's endpoint."""
    host, _, port = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")
    if ":" in host:
        raise ConfigError(
            f"Paddle's store, which the ranks meet at, cannot be served at {host}",
            expected="an IPv4 address of rank 0's host, or a name that leads to it",
            fix="launch with IPv4 addresses, and let what is computed go over IPv6 by "
            "FLEETPIPE_ADDRESS on each host",
        )
    return host, int(port)


def meet(
    store: Store,
    key: str,
    timeout: float,
    place: str = "",
    gone: Callable[[], Collection[int]] = tuple,
    ranks: Collection[int] | None = None,
) -> None:
    """Waits until some ranks have come to a meeting. Collective over them.

    Args:
        store: The job's store.
        key: The meeting's key in the store, new for each meeting.
        timeout: Seconds to wait.
        place: The purpose of the meeting, for messages; by default the start of the job.
        gone: Returns the ranks that have ended. The store raises a known failure, but only while a
            rank is missing: a rank that came may fail later, in its next operation.
        ranks: The ranks that meet; by default all ranks of the job.

    Raises:
        PeerFailed: A rank ended, and had not come before.
        PipelineTimeout: Names the ranks that did not come; all that did raise it.
    """
    store.add(f"{key}/{own_rank()}", 1)
    everyone = range(world_size())
    keys = {rank: f"{key}/{rank}" for rank in (everyone if ranks is None else ranks)}

    def given_up() -> bool:
        """Returns whether another rank has waited at this meeting for as long as its limit."""
        # The others' limits began at other moments: the first rank that gives up ends all waits.
        return store.add(f"{key}/late", 0) > 0

    def failure(missing: list[int], ended: set[int]) -> FleetPipeError:
        """Returns the error for the missing ranks, after telling the others of it."""
        if ended:
            return PeerFailed(
                f"rank {min(ended)} ended and did not come to {place}",
                fix=f"read the log of rank {min(ended)}",
            )
        store.add(f"{key}/late", 1)
        absent = [rank for rank in everyone if rank not in keys]
        wait_for_store_users(store, f"{key}/going", [*missing, *absent])
        who = f"ranks {missing}" if missing[1:] else f"rank {missing[0]}"
        return _missing_error(who, timeout, place=place)

    for _ in await_keys(store, keys, Limit(timeout), failure, gone, given_up):
        pass


def wait_for_store_users(store: Store, key: str, missing: list[int] | None = None) -> None:
    """Keeps rank 0, which serves the store, from leaving before the others. Collective.

    Args:
        store: The job's store.
        key: The key at which the ranks count themselves, new for each call.
        missing: The ranks that do not take part.
    """
    expected = world_size() - len(missing or ())
    deadline = time.monotonic() + _LAST_SECONDS
    arrived = store.add(key, 1)
    while own_rank() == 0 and arrived < expected and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        arrived = store.add(key, 0)


def give_paddle_an_address(store: Store, timeout: float) -> None:
    """Gives Paddle an address for a store of its own, if it has none. Collective over the job.

    A job does not need that store, but other functions of Paddle's open it. Without an address from
    the launcher they would use the one of the job's store.
    """
    if not _paddle_has_an_address():
        if own_rank() == 0:
            host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0]
            with socket.socket() as probe:
                probe.bind((host, 0))
                store.set("fleetpipe/master", f"{host}:{probe.getsockname()[1]}")
        meet(store, "fleetpipe/master/known", timeout)
        os.environ["PADDLE_MASTER"] = store.get("fleetpipe/master").decode()


def begin_beside_paddle(timeout: float) -> None:
    """Opens the job's store before Paddle opens its own. Collective over all ranks.

    Args:
        timeout: Seconds to wait for the other ranks.

    Raises:
        PipelineTimeout: Some ranks did not come.
        FleetPipeError: An error of :func:`open_store`.
    """
    begun = paddle.distributed.is_initialized()
    if world_size() > 1 and not begun and not _paddle_has_an_address():
        give_paddle_an_address(opened_store(timeout), timeout)


def _paddle_has_an_address() -> bool:
    """Returns whether the environment has an address for a store of Paddle's own."""
    environment = os.environ
    return "PADDLE_MASTER" in environment or bool(
        environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")
    )


def _refuse_paddles_store() -> None:
    """Refuses to begin a job if Paddle began before it in a way that leaves the job no store.

    Raises:
        StateError: Paddle has a store at the job store's address, or lacks its groups of ranks.
    """
    if began_without_groups():
        raise StateError(
            "Paddle began without the groups of ranks that a job needs",
            cause="paddle.distributed.init_parallel_env() came before the import of fleetpipe, and "
            "PADDLE_DISTRI_BACKEND is not gloo: CUDA_VISIBLE_DEVICES names devices, and there are "
            "none",
            fix="leave it out: fleet.init does it; or import fleetpipe.fleet before it",
        )
    if paddle.distributed.is_initialized() and not _paddle_has_an_address():
        raise StateError(
            "Paddle's own store has the address of the job's store, that of rank 0",
            cause="paddle.distributed.init_parallel_env() or Paddle's fleet.init came before, on "
            "ranks that were started without PADDLE_MASTER",
            fix="leave it out: fleet.init does it; or set PADDLE_MASTER=HOST:PORT, a free port of "
            "rank 0's host, on every rank",
        )


def _refuse_taken_port(host: str, port: int) -> None:
    """Raises an error if rank 0 cannot listen at the store's address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise TransportError(
                f"rank 0 cannot open the job's store at {host}:{port}: {error.strerror}",
                cause="another program listens there"
                if taken
                else f"{host} is no address of this host",
                fix="launch again, or with --master HOST:PORT or another --start_port",
            ) from error


def _connect_to_store(
    host: str, port: int, timeout: float, sign: str, check: Callable[[], None]
) -> JobStore:
    """Returns a connection to the job's store; rank 0 serves it, other ranks wait until it does.

    Paddle's own client has no limit for that wait.

    Args:
        host: The host of rank 0.
        port: The port of rank 0.
        timeout: Seconds to wait.
        sign: A key that the job's store has, and that of another job has not.
        check: Called meanwhile; raises an error to end the wait.
    """
    if own_rank() == 0:
        _refuse_taken_port(host, port)
        _servers.append(open_tcp_store(host, port, True, timeout))
    limit = Limit(timeout)
    number = attempt_files.number()
    while True:
        check()
        try:
            store = JobStore(host, port, min(timeout, _ANSWER_SECONDS))
        except OSError as error:
            finding = f"nothing listens at {host}:{port} ({error.strerror or error})"
        else:
            try:
                if own_rank() == 0:
                    store.set(f"{sign}/life", str(number))
                    store.add(sign, 1)
                # The attempt of the job that it serves; None if it serves another job.
                current = int(store.get(f"{sign}/life")) if store.add(sign, 0) else None
                if current == number:
                    store.timeout = timeout
                    return store
                if current is not None and current > number:
                    store.close()
                    raise TransportError(
                        f"rank {own_rank()} of attempt {number} of the job was refused: "
                        f"the job is in attempt {current}",
                        cause="this process was left over when the job was started again",
                        fix="end this process; the attempt that runs has another in its place",
                    )
            except (PeerFailed, PipelineTimeout):
                pass
            finding = f"what listens at {host}:{port} does not answer as the job's store"
            store.close()
        if limit.reached():
            raise _missing_error("rank 0", timeout, finding)
        time.sleep(_POLL_SECONDS)


def _missing_error(
    who: str, timeout: float, got: str | None = None, place: str = ""
) -> PipelineTimeout:
    """Returns the error for ranks that did not come to a meeting.

    Args:
        who: The ranks, in words.
        timeout: The limit in seconds.
        got: What was found in their place; None for nothing.
        place: The purpose of the meeting; "" for the start of the job.
    """
    return PipelineTimeout(
        f"{who} did not {f'come to {place}' if place else 'call fleet.init'} within {timeout:g} s",
        where=f"rank {own_rank()}, {place or 'start of the job'}",
        got=got,
        cause="other calls than on this rank, or slow"
        if place
        else "not started, ended before, or still loading",
        fix="see their logs; raise fleetpipe_configs['timeout'] if they are only slow",
    )


def facts(*options: Any) -> dict[str, str]:
    """Returns the facts on which all ranks must agree, by subject: versions, options, settings.

    Args:
        *options: Options, as dataclasses. Ranks need only agree on whether ``trace``, a folder, is
            set, and not on ``serve``: both matter to rank 0 alone.
    """
    settings = {**numerics.settings(), "fleetpipe": __version__}
    for options_of in options:
        for name, value in asdict(options_of).items():
            if name != "serve":
                settings[name] = str(value is not None) if name == "trace" else repr(value)
    return settings


def require_agreement(
    store: Store,
    key: str,
    facts: Mapping[str, str],
    timeout: float,
    gone: Callable[[], Collection[int]] = tuple,
) -> None:
    """Compares the facts that each rank of the job has. Collective over the job.

    Args:
        store: The job's store. Ranks compare digests there, and the facts only if the digests
            differ.
        key: The key in the store, new for each comparison.
        facts: What must be the same on all ranks, by subject.
        timeout: Seconds that the ranks may take to arrive.
        gone: Returns the ranks that have ended.

    Raises:
        ConfigError: Some rank has other facts; the message shows both sides. Every rank raises.
        PeerFailed: Some rank ended before it arrived.
        PipelineTimeout: Some rank did not arrive; the message says which.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    store.set(f"{key}/facts/{own_rank()}", text)
    store.set(f"{key}/digest/{own_rank()}", hashlib.sha256(text.encode()).hexdigest())
    meet(store, f"{key}/published", timeout, _COMPARISON, gone)
    ranks = range(world_size())
    digests = [store.get(f"{key}/digest/{rank}") for rank in ranks]
    differing = [rank for rank in ranks if digests[rank] != digests[0]]
    if differing:
        first, other = (json.loads(store.get(f"{key}/facts/{rank}")) for rank in (0, differing[0]))
        error = _disagreement_error(first, other, differing)
        # Nobody raises, and so ends the store or others' waits, before all have seen both sides.
        meet(store, f"{key}/compared", timeout, _COMPARISON, gone)
        wait_for_store_users(store, f"{key}/seen")
        raise error


def _disagreement_error(
    first: Mapping[str, str], other: Mapping[str, str], differing: list[int]
) -> ConfigError:
    """Returns the error that shows how facts differ.

    Args:
        first: The facts of rank 0.
        other: The facts of the first rank that differs.
        differing: All ranks that differ.
    """
    subjects = [name for name in {**first, **other} if first.get(name) != other.get(name)]

    def in_words(facts: Mapping[str, str]) -> str:
        """Returns one rank's first facts of those that differ, as text."""
        shown = [f"{name} = {facts.get(name, 'nothing')}" for name in subjects[:_MOST_SHOWN]]
        return "; ".join(shown) + ("; .." if len(subjects) > _MOST_SHOWN else "")

    also = f" (nor do ranks {differing[1:]})" if len(differing) > 1 else ""
    return ConfigError(
        f"ranks 0 and {differing[0]} of the job do not run the same{also}",
        expected=f"as on rank 0: {in_words(first)}",
        got=f"on rank {differing[0]}: {in_words(other)}",
        fix="start all ranks with the same script, arguments, environment and versions",
    )
