"""Lists the nodes of a Ray cluster, and collects the answers of processes on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.exceptions import RayError

from fleetpipe.errors import ConfigError, reason

#: Seconds that a node may take to start a process and say what it has.
_CHECK_SECONDS = 60.0


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


def staying() -> list[RayNode]:
    """Returns the live nodes of the cluster, except those that are about to be taken away."""
    # What Ray Train itself asks for preemption: its answer to a train loop is collective.
    leaving = state.get_draining_nodes()
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]


def answers(references: dict[RayNode, Any]) -> dict[RayNode, Any]:
    """Returns the results of the processes on some nodes.

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
