"""Tells each worker of Ray Train which rank of a Paddle job it is.

Ray numbers its workers node by node, and a rank has the number of its worker. So neighbours in a
pipeline are on one node if that has room for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ray
from ray.train.backend import Backend, BackendConfig

from fleetpipe import systems
from fleetpipe.errors import TransportError
from fleetpipe.transport.joining import hosts

#: Below the ports that the system gives to outgoing connections, above those of Ray's workers.
_PORTS = range(20000, 32000)

_PR_SET_PDEATHSIG = 1
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass
class PaddleConfig(BackendConfig):
    """Describes how the workers of a :class:`fleetpipe.ray.PaddleTrainer` form one Paddle job.

    Args:
        hybrid_configs: The train loop's ``strategy.hybrid_configs``, which decide which workers
            share a replica, and so which batches of ``datasets=`` each one gets.
        wait_for_nodes: Seconds that a cluster without room for the workers may take to grow.
    """

    hybrid_configs: Mapping[str, Any] | None = None
    wait_for_nodes: float = 5.0

    def __post_init__(self) -> None:
        """Refuses degrees that no strategy takes, before Ray starts a worker.

        Raises:
            ConfigError: An option is unknown, or has a value that cannot be used.
        """
        if self.hybrid_configs:
            # The strategy needs Paddle, which a driver loads for this alone.
            from fleetpipe.fleet import DistributedStrategy

            DistributedStrategy().hybrid_configs = self.hybrid_configs

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that makes the workers ranks."""
        return PaddleBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """The context manager within which each train loop runs."""
        return _as_rank

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as a dict, which Ray shows."""
        return dataclasses.asdict(self)


class PaddleBackend(Backend):
    """Makes each worker of a group a rank, before its train loop begins."""

    #: NCCL reaches the other devices of a node only where a process may see them.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Sets the variables of Paddle's launcher in every worker of ``worker_group``."""
        addresses = [
            worker_group.execute_single_async(rank, adopt, environment)
            for rank, environment in enumerate(environments(worker_group))
        ]
        ray.get(addresses)


class RankPlace(NamedTuple):
    """The node, the address and the GPU of a worker.

    Attributes:
        node: Ray's name of its node.
        address: The address at which other nodes reach it.
        device: The number of its GPU among those that it sees; "" without one.
    """

    node: str
    address: str
    device: str


def environments(worker_group: Any) -> list[dict[str, str]]:
    """Returns the environment variables that describe the job to each rank, by rank.

    Args:
        worker_group: Ray's group of workers, which tell their places and free ports.
    """
    places: list[RankPlace] = worker_group.execute(own_place)
    nodes = [place.node for place in places]
    # Of each node one worker answers: two that probe at once would be given the same port.
    ports = {
        node: worker_group.execute_single_async(nodes.index(node), free_ports, ranks + 1)
        for node, ranks in Counter(nodes).items()
    }
    return rank_environments(
        places, {node: ray.get(reference) for node, reference in ports.items()}
    )


def rank_environments(places: list[RankPlace], ports: dict[str, list[int]]) -> list[dict[str, str]]:
    """Returns the environment variables that describe the job to each rank, by rank.

    Args:
        places: The place of each rank.
        ports: Free ports of each node: one for each rank there, and one for Paddle's store.
    """
    nodes = [place.node for place in places]
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    endpoints = [
        f"{place.address}:{ports[place.node][number]}" for place, number in zip(places, local)
    ]
    return [
        {
            **hosts.rank_variables(rank, local[rank], endpoints, nodes),
            "PADDLE_MASTER": f"{places[0].address}:{ports[nodes[0]][-1]}",
            # Without it Paddle waits for ever at an HTTP store of its own on a CPU.
            **(
                {"FLAGS_selected_gpus": place.device}
                if place.device
                else {"PADDLE_DISTRI_BACKEND": "gloo"}
            ),
        }
        for rank, place in enumerate(places)
    ]


def adopt(environment: Mapping[str, str]) -> None:
    """Makes this process the rank of ``environment``; runs in the worker, before its train loop."""
    os.environ.update(environment)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := hosts.gloo_interface()[0]):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def own_place() -> RankPlace:
    """Returns the place of this worker."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = str(seen.index(gpus[0]) if gpus[0] in seen else 0) if gpus else ""
    return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), device)


def free_ports(count: int) -> list[int]:
    """Returns ``count`` ports of this host at which nobody listens."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise TransportError(
        f"{socket.gethostname()} has too few free ports",
        expected=f"{count} of {_PORTS.start} to {_PORTS.stop - 1}",
        got=str(len(ports)),
        fix="end what listens there",
    )


def _end_with_worker() -> None:
    """Ends a child of a worker with it: it shares sockets whose close tells Ray of the end."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _as_rank() -> Iterator[None]:
    """Prepares the thread of a train loop, and ends its job with it; others get its error."""
    from fleetpipe.paddle_api.loading import load_data_in_threads

    load_data_in_threads()
    systems.call_in_forked_child(_end_with_worker)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        running = sys.modules.get("fleetpipe.job.job")
        if running is not None:
            running.end(error)
