"""Which nodes of a cluster take part in an attempt, with which ranks, and whether they can."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.exceptions import RayError

from fleetpipe.errors import ConfigError, TransportError, reason

#: Seconds that a node may take to start a process and say what it has.
_CHECK_SECONDS = 60.0


class RayNode(NamedTuple):
    """A node of the cluster.

    Attributes:
        name: Ray's.
        address: Of its host.
        places: How many ranks it has room for: its GPUs, or CPUs.
    """

    name: str
    address: str
    places: int

    @property
    def label(self) -> dict[str, str]:
        """By which Ray starts something on this node alone."""
        return {"ray.io/node-id": self.name}


class ClusterSize(NamedTuple):
    """How many ranks a job may have.

    Attributes:
        nodes: The least and the most nodes that take part.
        ranks: On each.
        replica: Ranks of one replica: the job has a multiple of them.
        alone: Whether one rank can play all of a replica.
    """

    nodes: tuple[int, int]
    ranks: int
    replica: int = 1
    alone: bool = False


def resource() -> str:
    """Returns what each rank takes one of: ``GPU`` where the cluster has any, else ``CPU``."""
    return "GPU" if ray.cluster_resources().get("GPU") else "CPU"


def staying(resource: str) -> list[RayNode]:
    """Returns the cluster's nodes that live, save for those that are about to be taken away."""
    # What Ray Train itself asks for preemption: its answer to a train loop is collective.
    leaving = state.get_draining_nodes()
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get(resource, 0)))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]


def placed(nodes: Iterable[RayNode], size: ClusterSize, before: Collection[str]) -> list[str]:
    """Returns the name of each rank's node; none where there are too few nodes.

    Args:
        nodes: Those that there are.
        size: How many ranks the job may have.
        before: Names of those of the last attempt, which come first, in their order.
    """
    order = {name: place for place, name in enumerate(dict.fromkeys(before))}
    fit = [node.name for node in nodes if node.places >= size.ranks]
    fit.sort(key=lambda name: order.get(name, len(order)))
    if len(fit) < size.nodes[0]:
        return []
    ranks = [name for name in fit[: size.nodes[1]] for _ in range(size.ranks)]
    whole = len(ranks) - len(ranks) % size.replica
    return ranks[: whole or int(size.alone)]


def too_few(nodes: Iterable[RayNode], size: ClusterSize, resource: str) -> ConfigError:
    """Returns the error of a cluster that has too few nodes, with what it has."""
    least = f"{size.nodes[0]} nodes with {size.ranks} {resource} each"
    if size.replica > 1:
        least += f", and a multiple of {size.replica} ranks"
    there = [f"{node.address} with {node.places}" for node in nodes]
    return ConfigError(
        "the Ray cluster is too small for the job",
        expected=least,
        got=", ".join(there) or "no nodes",
        fix="lower --nnodes or --nproc, add nodes, or give --wait SECONDS to wait for them",
    )


def check(nodes: Collection[RayNode], script: Path) -> None:
    """Checks that every node has what the ranks need, and reaches the others' ports.

    Raises:
        ConfigError: A node lacks a package or the script, has another version of one, or starts no
            process at all.
        TransportError: A node cannot reach another.
    """
    actor = ray.remote(num_cpus=0)(_probe())
    probes = {node: actor.options(label_selector=node.label).remote() for node in nodes}
    try:
        facts = answers(
            {node: probe.facts.remote(str(script), node.address) for node, probe in probes.items()}
        )
        first, *rest = facts
        for node in facts:
            missing = [name for name, value in facts[node].items() if value is None]
            if missing:
                raise ConfigError(
                    f"the node {node.address} has no {missing[0]}",
                    fix="install the same packages on every node, and give them all the script",
                )
        for node in rest:
            unlike = [n for n in facts[first] if n != "port" and facts[node][n] != facts[first][n]]
            if unlike:
                raise ConfigError(
                    f"the nodes have different versions of {unlike[0]}",
                    expected=f"{facts[first][unlike[0]]}, as on {first.address}",
                    got=f"{facts[node][unlike[0]]} on {node.address}",
                    fix="install the same packages on every node",
                )
        ports = {node: (node.address, facts[node]["port"]) for node in facts}
        unreached = answers(
            {
                node: probe.unreached.remote([at for other, at in ports.items() if other != node])
                for node, probe in probes.items()
            }
        )
        for node, failures in unreached.items():
            for host, port, why in failures:
                raise TransportError(
                    f"the node {node.address} cannot reach {host}, port {port}: {why}",
                    cause="a firewall between the nodes, most often",
                    fix="let the nodes reach each other's ports from 10000 on",
                )
    finally:
        for probe in probes.values():
            ray.kill(probe)


def answers(references: dict[RayNode, Any]) -> dict[RayNode, Any]:
    """Returns what the processes on some nodes return.

    Raises:
        ConfigError: A node starts no process in time, or cannot run this one.
    """
    done, _ = ray.wait(
        list(references.values()), num_returns=len(references), timeout=_CHECK_SECONDS
    )
    for node, answer in references.items():
        if answer not in done:
            raise ConfigError(
                f"the node {node.address} started no process in {_CHECK_SECONDS:g} s",
                cause="another Python than the driver's, or a node that is lost or overloaded",
                fix="look at Ray's logs there, in /tmp/ray/session_latest/logs",
            )
    return {node: _answer(node, answer) for node, answer in references.items()}


def _answer(node: RayNode, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except RayError as error:
        raise ConfigError(
            f"the node {node.address} cannot run what the driver asks for",
            got=reason(error),
            fix="use the same Python and the same packages as the driver on every node",
        ) from error


def _probe() -> type:
    # A class of a function goes over with its code: the node may have no fleetpipe.
    class Probe:
        def facts(self, script: str, address: str) -> dict[str, Any]:
            import contextlib
            import importlib.metadata
            import os
            import platform
            import socket

            def version(package: str) -> str | None:
                try:
                    return importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    return None

            self.listening = socket.create_server(("", 0))
            paddle = version("paddlepaddle") or version("paddlepaddle-gpu")
            fleetpipe: str | None = None
            with contextlib.suppress(ImportError):
                fleetpipe = importlib.import_module("fleetpipe.version").__version__
            return {
                "Python": platform.python_version(),
                "package ray": version("ray"),
                "package fleetpipe": fleetpipe,
                "package paddle": paddle,
                f"script {script}": os.path.isfile(script) or None,
                "port": self.listening.getsockname()[1],
            }

        def unreached(self, addresses: list[tuple[str, int]]) -> list[tuple[str, int, str]]:
            import socket

            pairs = []
            for address in addresses:
                try:
                    socket.create_connection(address, 5).close()
                except OSError as error:
                    pairs.append((*address, str(error)))
            return pairs

    return Probe
