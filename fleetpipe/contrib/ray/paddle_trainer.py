"""``PaddleTrainer``: the counterpart of Ray's ``TorchTrainer`` for Paddle and its pipelines.

Its backend tells each worker which rank of a Paddle job it is. Ray numbers its workers node by
node, and a rank has the number of its worker. So neighbours in a pipeline are on one node if that
has room for them.
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
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import ControllerError, Result, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from fleetpipe import systems
from fleetpipe.contrib.ray import ray_cluster
from fleetpipe.errors import ConfigError, TransportError, reason
from fleetpipe.mesh.axes import DENSE, Degrees, Mesh
from fleetpipe.transport import hosts

#: The ports of ranks: below the system's ephemeral ports, above those of Ray's workers.
_RANK_PORTS = range(20000, 32000)

#: The option of Linux' ``prctl`` by which a process gets a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None

#: How often Ray's controller looks at the workers, in seconds.
_POLL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"


@dataclasses.dataclass
class PaddleConfig(BackendConfig):
    """Describes how the workers of a :class:`fleetpipe.ray.PaddleTrainer` form one Paddle job.

    Args:
        hybrid_configs: The train loop's ``strategy.hybrid_configs``, which decide which workers
            share a replica, and thus which batches of ``datasets=`` each worker gets.
        wait_for_nodes: Seconds that a cluster without room for the workers may take to grow.
    """

    hybrid_configs: Mapping[str, Any] | None = None
    wait_for_nodes: float = 5.0

    def __post_init__(self) -> None:
        """Refuses invalid degrees, before Ray starts a worker.

        Raises:
            ConfigError: An option is unknown, or has a value that cannot be used.
        """
        if self.hybrid_configs:
            # The driver loads Paddle for the strategy alone.
            from fleetpipe.fleet import DistributedStrategy

            DistributedStrategy().hybrid_configs = self.hybrid_configs

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of Ray's backend, which makes each worker a rank."""
        return PaddleBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """The context manager within which each train loop runs."""
        return _running_as_rank

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as a dict, which Ray shows."""
        return dataclasses.asdict(self)


class PaddleBackend(Backend):
    """Makes each worker of a group a rank, before its train loop begins."""

    #: NCCL reaches another device of the node only if the process sees that device.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Sets the variables of Paddle's launcher in every worker of ``worker_group``."""
        addresses = [
            worker_group.execute_single_async(rank, become_rank, environment)
            for rank, environment in enumerate(environments(worker_group))
        ]
        ray.get(addresses)


class RankPlace(NamedTuple):
    """The node, the address and the GPU of a worker.

    Attributes:
        node: Ray's name of the worker's node.
        address: The address at which other nodes reach it.
        device: The number of the worker's GPU among the visible ones; "" without a GPU.
    """

    node: str
    address: str
    device: str


def environments(worker_group: Any) -> list[dict[str, str]]:
    """Returns for each rank the environment variables that describe the job to it.

    Args:
        worker_group: Ray's group of workers, each of which reports its place and free ports.
    """
    places: list[RankPlace] = worker_group.execute(worker_place)
    nodes = [place.node for place in places]
    # One worker of each node answers: two that probe at once could find the same port.
    ports = {
        node: worker_group.execute_single_async(nodes.index(node), free_ports, ranks + 1)
        for node, ranks in Counter(nodes).items()
    }
    return rank_environments(places, dict(zip(ports, ray.get(list(ports.values())))))


def rank_environments(places: list[RankPlace], ports: dict[str, list[int]]) -> list[dict[str, str]]:
    """Returns for each rank the environment variables that describe the job to it.

    Args:
        places: The place of each rank.
        ports: Free ports of each node: one for each rank there, and one for Paddle's store.
    """
    nodes = [place.node for place in places]
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    endpoints = [
        f"{place.address}:{ports[place.node][number]}" for place, number in zip(places, local)
    ]
    variables = []
    for rank, place in enumerate(places):
        of_rank = hosts.rank_variables(rank, local[rank], endpoints, nodes)
        of_rank = {**of_rank, "PADDLE_MASTER": f"{places[0].address}:{ports[nodes[0]][-1]}"}
        if place.device:
            of_rank["FLAGS_selected_gpus"] = place.device
        else:
            # Without it Paddle on a CPU waits for ever at an HTTP store of its own.
            of_rank["PADDLE_DISTRI_BACKEND"] = "gloo"
        variables.append(of_rank)
    return variables


def become_rank(environment: Mapping[str, str]) -> None:
    """Makes this worker the rank that the variables of ``environment`` describe.

    Runs in the worker, before its train loop.
    """
    os.environ.update(environment)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := hosts.gloo_interface()[0]):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def worker_place() -> RankPlace:
    """Returns the node, the address and the GPU of this worker; runs in the worker."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    device = str(visible.index(gpus[0]) if gpus[0] in visible else 0) if gpus else ""
    return RankPlace(context.get_node_id(), ray.util.get_node_ip_address(), device)


def free_ports(count: int) -> list[int]:
    """Returns ``count`` ports of this host at which nobody listens."""
    ports: list[int] = []
    for port in random.sample(_RANK_PORTS, len(_RANK_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise TransportError(
        f"{socket.gethostname()} has too few free ports",
        expected=f"{count} of {_RANK_PORTS.start} to {_RANK_PORTS.stop - 1}",
        got=str(len(ports)),
        fix="end what listens there",
    )


@contextlib.contextmanager
def _running_as_rank() -> Iterator[None]:
    """Returns a context for a train loop of a rank, at whose end the loop's job ends.

    If the loop raises an error, the other ranks get it too.
    """
    from fleetpipe.paddle_api.loading import load_data_in_threads

    load_data_in_threads()
    if sys.platform == "linux":
        # A forked child holds sockets on which Ray waits, so it ends when its worker does.
        systems.call_in_forked_child(lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if running := sys.modules.get("fleetpipe.job.job"):
            running.end(error)


class PaddleTrainer(DataParallelTrainer):
    """Trains with Paddle on the workers of a Ray cluster, each of which is a rank.

    ``fit`` runs on the cluster that the process is connected to (``ray.init``), or at the address
    ``RAY_ADDRESS``; else it starts a cluster on this host, which ends with it. If a worker dies and
    ``FailureConfig(max_failures=..)`` allows it, all workers begin again and go on from the newest
    checkpoint that was reported.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        paddle_config: PaddleConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
    ) -> None:
        """Describes a training; starts nothing.

        Args:
            train_loop_per_worker: The function that every rank runs: the body of a script of
                Fleet's, from ``fleet.init`` on, or of one with ``fleetpipe.Model``. Takes
                ``train_loop_config``, or nothing. ``ray.train`` works in it: ``report``,
                ``get_checkpoint``, ``get_dataset_shard``.
            train_loop_config: The argument of the train loop.
            scaling_config: ``num_workers`` is the number of ranks.
            run_config: Where results go, what is kept, and how often a failed run is tried again.
            paddle_config: The strategy's degrees, which ``datasets`` need, and other options.
            datasets: Datasets of Ray's by name, or functions without arguments that return one. The
                ranks of a replica get the same batches, and replicas different ones.

        Raises:
            ConfigError: The degrees do not fit the number of workers, or are needed and not given;
                or a config is of another type.
        """
        config = PaddleConfig() if paddle_config is None else paddle_config
        if not isinstance(config, PaddleConfig):
            raise ConfigError(
                "paddle_config is no PaddleConfig",
                got=repr(config),
                fix="paddle_config=PaddleConfig(hybrid_configs={..}), or leave it out",
            )
        if not isinstance(train_loop_config, (Mapping, type(None))):
            raise ConfigError(
                "train_loop_config is no mapping",
                got=type(train_loop_config).__name__,
                fix="give a dict: train_loop_config={'rate': 0.01}",
            )
        scaling = scaling_config or ScalingConfig()
        degrees = config.hybrid_configs
        if datasets and degrees is None and scaling.max_workers > 1:
            raise ConfigError(
                "datasets= needs to know which ranks are one replica, and read the same batches",
                expected="the degrees that the train loop gives to its strategy",
                fix='paddle_config=PaddleConfig(hybrid_configs={"dp_degree": -1, "pp_degree": 2})',
            )
        for ranks in {scaling.min_workers, scaling.max_workers} - {0} if degrees else ():
            try:
                replicas(degrees or {}, ranks)
            except ConfigError as error:
                raise ConfigError(
                    f"num_workers (={ranks}) does not fit the degrees of PaddleConfig",
                    got=str(error).splitlines()[0],
                    fix="set num_workers to a multiple of the product of the degrees other than "
                    "dp_degree, and dp_degree to -1",
                ) from error
        super().__init__(
            train_loop_per_worker,
            train_loop_config=None if train_loop_config is None else dict(train_loop_config),
            backend_config=config,
            scaling_config=scaling,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=ReplicaDataConfig(degrees or {}),
        )

    def fit(self) -> Result:
        """Trains, and returns the newest metrics and checkpoint that were reported.

        Raises:
            ConfigError: ``storage_path`` cannot be written, the cluster does not answer or has no
                room for the workers, or a node lacks what they need.
            ray.train.TrainingFailedError: A worker failed more often than ``max_failures`` allows.
        """
        scaling = self.scaling_config
        self._require_storage()
        if self.running_in_local_mode:
            return super().fit()
        bundle = scaling._resources_per_worker_not_none
        with ray_cluster.connect(os.environ.get("RAY_ADDRESS"), scaling.total_resources):
            config: PaddleConfig = self.backend_config
            ray_cluster.require_room(bundle, scaling.min_workers, config.wait_for_nodes)
            ray_cluster.require_packages(self.run_config.worker_runtime_env)
            # By default Ray notices a report or a failure only every two seconds.
            poll = ray_cluster.environment({_POLL: os.environ.get(_POLL, "0.25")})
            with poll, _interrupt_handler_kept():
                return super().fit()

    def _require_storage(self) -> None:
        """Raises ConfigError if the folder or URI of the results cannot be written."""
        try:
            _ = self.run_config.storage_context
        except (OSError, ValueError) as error:  # pyarrow's are among them
            raise ConfigError(
                f"storage_path cannot be written: {self.run_config.storage_path}",
                got=reason(error),
                fix="RunConfig(storage_path=..): the absolute path of a folder that every node can "
                "write, or a URI such as s3://bucket/path",
            ) from error

    def _create_default_callbacks(self) -> list[Any]:
        """Returns Ray's callbacks without the cleaner of placement groups, and ``_FreeLostStarts``.

        The cleaner queries Ray's dashboard every second, to free the resources of a lost
        controller, which are freed when the driver ends, too.
        """
        callbacks: list[Any] = super()._create_default_callbacks()
        cleaner = PlacementGroupCleanerCallback
        return [_FreeLostStarts(), *(c for c in callbacks if not isinstance(c, cleaner))]

    def _initialize_and_run_controller(self, **controller: Any) -> Result:
        """Runs the controller with a policy for workers that are lost while they start."""
        controller["failure_policy"] = _StartPolicy(self.run_config.failure_config)
        return super()._initialize_and_run_controller(**controller)


class _StartPolicy(DefaultFailurePolicy):
    """Starts all workers again if one dies while Ray passes the train loop to it.

    Ray itself does so at every earlier moment of a start, but not then. Both count towards
    ``FailureConfig(controller_failure_limit=..)``, which by default is no limit.
    """

    def _is_retryable_error(self, training_failed_error: TrainingFailedError) -> bool:
        """Returns whether Ray starts all workers again after an error; Ray calls this."""
        lost = isinstance(training_failed_error, ControllerError) and isinstance(
            training_failed_error.controller_failure, RayActorError
        )
        return lost or bool(super()._is_retryable_error(training_failed_error))


class _FreeLostStarts(WorkerGroupCallback):
    """Frees the workers' resources if one died while they started, which Ray does not do."""

    def __init__(self) -> None:
        self._started: Any = None

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Shuts down the workers of the start before, unless Ray has done so."""
        if self._started is not None:
            self._started.shutdown()

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Remembers the workers, which hold resources."""
        self._started = worker_group

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Forgets the workers, whose resources Ray frees."""
        self._started = None


@contextlib.contextmanager
def _interrupt_handler_kept() -> Iterator[None]:
    """In this context Ray may handle Ctrl-C; its end restores the earlier handler."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)


def replicas(hybrid_configs: Mapping[str, Any], ranks: int) -> list[int]:
    """Returns the replica (dp and sharding) that each rank is part of, by rank.

    Args:
        hybrid_configs: The degrees of the strategy; a missing ``dp_degree`` is computed.
        ranks: Number of ranks.

    Raises:
        ConfigError: The degrees do not fit as many ranks.
    """
    degrees = Degrees.resolve({"dp_degree": -1, **hybrid_configs}, ranks)
    if ranks == 1:
        return [0]
    mesh = Mesh.in_order(degrees, hybrid_configs.get("order") or DENSE)
    return [mesh.replica(mesh.coordinate(rank)) for rank in range(ranks)]


class ReplicaDataConfig(ray.train.DataConfig):
    """Splits datasets by replica: each replica reads its own batches, the same on all its ranks.

    Each dataset is computed once and held in Ray's object store, so that its random numbers are the
    same for all ranks of a replica.
    """

    def __init__(self, hybrid_configs: Mapping[str, Any]) -> None:
        """Takes the degrees of the strategy, which decide the replicas."""
        super().__init__()
        self._hybrid_configs = hybrid_configs

    def configure(
        self, datasets: Mapping[str, Any], world_size: int, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        """Returns the part of each dataset that each rank reads, by rank; Ray calls this."""
        replica_of = replicas(self._hybrid_configs, world_size)
        by_rank: list[dict[str, Any]] = [{} for _ in replica_of]
        for name, dataset in datasets.items():
            parts = dataset.materialize().split(max(replica_of) + 1, equal=True)
            for rank, replica in enumerate(replica_of):
                by_rank[rank][name] = parts[replica].iterator()
        return by_rank
