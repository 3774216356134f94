"""Connects to the Ray cluster of a job: the user's, or a new one that ends with the job.

``connect`` does this; ``require_room`` and ``require_packages`` refuse a cluster whose nodes cannot
run the workers. ``live_nodes`` lists the nodes, and ``gather_results`` waits for the results of
processes on them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import ray
from ray._private import ray_constants, ray_logging
from ray._private.state import state
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import AuthenticationError, RayError

from fleetpipe import systems
from fleetpipe.errors import ConfigError, reason
from fleetpipe.version import __version__

#: Seconds in which a node must start a process and return its result.
_CHECK_SECONDS = 60.0

#: Seconds in which a cluster must answer, and in which leaving one must end.
_ANSWER_SECONDS, _LEAVE_SECONDS = 5.0, 60.0
#: Makes Ray give up soon; by default it tries twenty times for 40 s to reach a cluster.
_GIVE_UP_SOON = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "3"}
#: The packages that a worker imports, each with the version that it must have, or "" for any.
NEEDED = {"fleetpipe": __version__, "paddle": ""}
_AUTH_MODE, _AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
#: Switches Ray's watcher of preempted nodes, which a cluster of one node does not need.
_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"


class RayNode(NamedTuple):
    """A node of the cluster.

    Attributes:
        name: Ray's name of the node.
        address: The address of its host.
    """

    name: str
    address: str

    @property
    def label(self) -> dict[str, str]:
        """The label by which Ray starts a process on this node alone."""
        return {"ray.io/node-id": self.name}


def live_nodes() -> list[RayNode]:
    """Returns the live nodes of the cluster, except those that are about to be preempted."""
    # Not ray.train's own function for preemption, which is collective in a train loop.
    leaving = state.get_draining_nodes()
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]


def gather_results(references: dict[RayNode, Any]) -> dict[RayNode, Any]:
    """Waits for the results of processes on some nodes, and returns them by node.

    Args:
        references: Ray's reference to the result of the process on each node.

    Raises:
        ConfigError: A node starts no process in time, or cannot run what this process asks for.
    """
    done, _ = ray.wait(
        list(references.values()), num_returns=len(references), timeout=_CHECK_SECONDS
    )
    for node, reference in references.items():
        if reference not in done:
            raise ConfigError(
                f"the node {node.address} started no process in {_CHECK_SECONDS:g} s",
                cause="another Python than the driver's, or a node that is lost or overloaded",
                fix="look at Ray's logs there, in /tmp/ray/session_latest/logs",
            )
    results = {}
    for node, reference in references.items():
        try:
            results[node] = ray.get(reference)
        except RayError as error:
            raise ConfigError(
                f"the node {node.address} cannot run what the driver asks for",
                got=reason(error),
                fix="use the same Python and the same packages as the driver on every node",
            ) from error
    return results


@contextlib.contextmanager
def connect(address: str | None, resources: Mapping[str, float]) -> Iterator[None]:
    """Returns a context in which this process is connected to a Ray cluster.

    If the process is connected already, it stays with that cluster; else it joins the cluster at
    ``address``. Without an address it starts a cluster on this host, which listens on the loopback,
    refuses processes without its token, and ends with the job in any case.

    Args:
        address: ``HOST:PORT``; ``"auto"`` for the cluster that ``ray start`` began here; or None.
        resources: What the whole job needs; a cluster that is started has at least that many CPUs.

    Raises:
        ConfigError: There is no such cluster, or it does not take this process.
    """
    if "RAY_DEDUP_LOGS" not in os.environ:
        # Ray would leave out lines that differ in numbers alone, as those of steps do.
        ray_logging.RAY_DEDUP_LOGS = False
    if ray.is_initialized():
        yield
    elif not address:
        with _start_cluster(resources):
            yield
    else:
        _join(address)
        try:
            yield
        finally:
            _disconnect()


@contextlib.contextmanager
def _start_cluster(resources: Mapping[str, float]) -> Iterator[None]:
    """Returns a context in which this process is connected to a new cluster on this host."""
    token = secrets.token_hex(32)
    reaper = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("reaper.py"))],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    with cast("IO[bytes]", reaper.stdin) as line:
        line.write(f"{token}\n".encode())
        line.flush()
        try:
            settings = environment({_AUTH_MODE: "token", _AUTH_TOKEN: token, _WATCHER: "0"})
            with settings, _on_loopback(), _stop_signals_blocked():
                _read_settings_again()
                ray.init(
                    "local",
                    num_cpus=max(os.cpu_count() or 1, int(resources.get("CPU", 0)) + 1),
                    include_dashboard=False,
                    logging_level="WARNING",
                )
            yield
        finally:
            _disconnect()
    reaper.wait()
    _read_settings_again()


def _disconnect() -> None:
    """Disconnects from the cluster, within a limited time: Ray may wait for a lock for ever."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)  # it would wait once more


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """In this context, the environment has ``changes``, which new processes inherit."""
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name)
        os.environ.update(before)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """In this context, a cluster that starts listens at 127.0.0.1 only."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    # On Linux Ray replaces a loopback address by one that other hosts reach.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """In this context, new processes block stop signals, and this one keeps its handlers.

    Schedulers send the signals to all processes of a job, but a cluster must outlive the job's last
    step. Ray's handlers would shut down whatever this process is doing, with its locks held, or end
    it by SIGABRT.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
    else:
        handlers = {number: signal.getsignal(number) for number in systems.STOP_SIGNALS}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if handler is not None:  # None is a handler that Python did not set
                    signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _read_settings_again() -> None:
    """Makes Ray read the environment and its token again, which by itself it reads only once."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _join(address: str) -> None:
    """Connects to the cluster at an address; raises ConfigError if that fails."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    local = _on_loopback() if host in ("127.0.0.1", "localhost") else contextlib.nullcontext()
    try:
        if address != "auto":
            if not port.isdigit():
                raise ValueError("no port")
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        with environment(_GIVE_UP_SOON), local, _stop_signals_blocked():
            _read_settings_again()
            ray.init(address, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise _joining_error(address, error) from error
    finally:
        _read_settings_again()


def _joining_error(address: str, error: Exception) -> ConfigError:
    """Returns the error to raise where a cluster could not be joined."""
    cause, text = error.__cause__, str(error)
    while cause is not None:
        cause, text = cause.__cause__, f"{text}: {cause}"
    got = text.strip().splitlines()[-1]  # Ray has whole tracebacks in its messages
    if "AuthToken" in text or isinstance(error, AuthenticationError):
        summary = "does not take this process: it has another token, or none"
        variables = f"{_AUTH_MODE}=token and {_AUTH_TOKEN} (or RAY_AUTH_TOKEN_PATH)"
        fix = f"export {variables} as on its head node"
    elif "ersion mismatch" in text:
        summary, got = "has other versions than this process", " ".join(text.split())
        fix = "use the same Python and the same Ray on all nodes"
    else:
        summary = "does not answer"
        fix = (
            "give HOST:PORT as ray start --head printed it, or have a cluster of the job's own: no "
            "address for PaddleTrainer, --ray local for fleetpipe launch"
        )
    return ConfigError(f"the Ray cluster at {address!r} {summary}", got=got, fix=fix)


def require_room(bundle: Mapping[str, float], workers: int, seconds: float) -> None:
    """Raises ConfigError if even idle nodes would have no room for the workers.

    Args:
        bundle: The resources of each worker.
        workers: Number of workers.
        seconds: How long to wait for more nodes.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        needed = {name: amount for name, amount in bundle.items() if amount}
        fitting = [
            [int(node["Resources"].get(name, 0) / amount) for name, amount in needed.items()]
            for node in alive
        ]
        most = sum(min(of_node, default=1) for of_node in fitting)
        if most >= workers:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    each = [
        f"{node['NodeManagerAddress']}: {_describe_resources(node['Resources'])}" for node in alive
    ]
    raise ConfigError(
        f"the cluster has room for {most} worker(s), {workers} are asked for",
        expected=f"{_describe_resources(bundle)} for each of {workers}",
        got="; ".join(each),
        fix="lower num_workers (of fleetpipe launch --nnodes or --nproc) or resources_per_worker, "
        "add nodes, or have the job wait for them: PaddleConfig(wait_for_nodes=600), --wait 600",
    )


def _describe_resources(resources: Mapping[str, float]) -> str:
    """Returns resources as text, such as ``CPU 2, GPU 1``, without those that users do not set."""
    named = {name: n for name, n in resources.items() if not name.startswith(("node:", "object_"))}
    return ", ".join(f"{name} {n:g}" for name, n in sorted(named.items()) if name != "memory")


def require_packages(runtime_env: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError if a node lacks a package that workers import, or has another version.

    Args:
        runtime_env: Ray's runtime environment of the workers.
    """

    def missing(needed: Mapping[str, str]) -> str:
        """Returns which package this node lacks, in words; empty if it lacks none."""
        # Ray sends the code of this function, so that a node without fleetpipe can run it.
        import importlib
        import importlib.util

        for package, version in needed.items():
            if importlib.util.find_spec(package) is None:
                return f"no package {package!r}"
            if version and importlib.import_module(f"{package}.version").__version__ != version:
                return f"another version of {package} than {version}"
        return ""

    remote = ray.remote(num_cpus=0, runtime_env=dict(runtime_env or {}))(missing)
    of_nodes = gather_results(
        {node: remote.options(label_selector=node.label).remote(NEEDED) for node in live_nodes()}
    )
    for node, text in of_nodes.items():
        if text:
            raise ConfigError(
                f"no worker can begin on the node {node.address}: {text}",
                fix="install the same packages on every node, or have Ray do it: RunConfig("
                "worker_runtime_env={'pip': [..]})",
            )
