"""A group of Ray Train's workers, one for each rank, and what they do for the driver."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from fleetpipe.contrib.ray import worker
from fleetpipe.contrib.ray.backend import PaddleConfig, RankPlace, rank_environments
from fleetpipe.contrib.ray.mailbox import Mailbox, WorkerOrder, WorkerReport


class _Trainer(DataParallelTrainer):
    def _create_default_callbacks(self) -> list[Any]:
        # The cleaner outlives the job where Ray has no dashboard to ask, and warns each second; the
        # placement goes with the controller. There are no datasets.
        without = (PlacementGroupCleanerCallback, DatasetsCallback)
        return [
            each for each in super()._create_default_callbacks() if not isinstance(each, without)
        ]


class Ended(NamedTuple):
    """How a rank's process ended in an attempt.

    Attributes:
        code: Its exit code; -n: by signal n.
        files: What it left in the folder of the attempt, by name.
    """

    code: int
    files: dict[str, bytes]


class WorkerGroup:
    """Workers on chosen nodes. Their train loop runs until the driver has them leave, or one dies.

    Attributes:
        nodes: Ray's name of each rank's node.
        ready: Where each rank that waits for an attempt runs, and ports that are free there.
        ended: How each rank ended in this attempt, the first one first.
        step: The step that the first rank is in; None before the first.
        replica: How many ranks a replica has, and whether one can play all; None: not known yet.
        output: What the first rank has said since this was last emptied.
    """

    def __init__(
        self, number: int, nodes: list[str], resource: str, mailbox: Any, runs: Path
    ) -> None:
        """Starts the workers, in the background.

        Args:
            number: Of the group; no other one of the job has it.
            nodes: Ray's name of each rank's node.
            resource: What each rank takes one of, ``CPU`` or ``GPU``.
            mailbox: The actor by which this process and the workers talk.
            runs: A folder for what Ray records of the group.
        """
        self.nodes = nodes
        self.ready: dict[int, tuple[RankPlace, list[int]]] = {}
        self.ended: dict[int, Ended] = {}
        self.step: int | None = None
        self.replica: tuple[int, bool] | None = None
        self.output: list[bytes] = []
        #: Why Ray gave the group up; None while it has not.
        self.error: Exception | None = None
        self._number = number
        self._mailbox = mailbox
        trainer = _Trainer(
            worker.serve,
            train_loop_config={"mailbox": mailbox, "group": number},
            backend_config=PaddleConfig(),
            scaling_config=ScalingConfig(
                num_workers=len(nodes),
                use_gpu=resource == "GPU",
                resources_per_worker={resource: 1},
                # The driver says where each rank is, so that it comes back to what it has kept.
                label_selector=[{"ray.io/node-id": node} for node in nodes],
            ),
            run_config=RunConfig(
                name=f"group-{number}",
                storage_path=str(runs),
                # Whether there is another attempt is the driver's to decide.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        )
        # In the main thread Ray would take Ctrl-C for itself.
        self._fit = threading.Thread(target=self._run, args=(trainer,), daemon=True)
        self._fit.start()

    def _run(self, trainer: _Trainer) -> None:
        try:
            trainer.fit()
        except Exception as error:
            self.error = error

    @property
    def over(self) -> bool:
        """Whether there are no workers any more."""
        return not self._fit.is_alive()

    def begin(self, attempt: dict[str, Any]) -> None:
        """Starts the ranks of an attempt, once all workers are ready."""
        self.ended.clear()
        self.step = None
        places = [self.ready[rank][0] for rank in range(len(self.nodes))]
        ranks = rank_environments(places, self._ports(places))
        self.ready.clear()
        self.tell(WorkerOrder("begin", worker.WorkerAttempt(**attempt, ranks=ranks)))

    def tell(self, order: WorkerOrder) -> None:
        """Gives all workers an order."""
        self._mailbox.order.remote(self._number, order)

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks."""
        self.tell(WorkerOrder("signal", number))

    def leave(self, seconds: float) -> None:
        """Ends the workers, and waits until they have."""
        self.tell(WorkerOrder("leave"))
        self._fit.join(seconds)

    def take(self, reports: Iterable[WorkerReport]) -> None:
        """Takes note of what workers have told; those of other groups do not count."""
        for group, rank, kind, value in reports:
            if group != self._number:
                continue
            if kind == "ready":
                self.ready[rank] = value
            elif kind == "ended":
                self.ended[rank] = Ended(*value)
            elif kind == "step":
                self.step, self.replica = value
            elif kind == "output":
                self.output.append(value)

    def _ports(self, places: list[RankPlace]) -> dict[str, list[int]]:
        """Returns ports by node, for each of its ranks and one more, no two alike."""
        needed = Counter(place.node for place in places)
        by_node: dict[str, list[int]] = {node: [] for node in needed}
        taken: set[int] = set()
        for place, ports in self.ready.values():
            fresh = [port for port in ports if port not in taken]
            lacking = needed[place.node] + 1 - len(by_node[place.node])
            by_node[place.node] += fresh[:lacking]
            taken.update(fresh[:lacking])
        return by_node


def mailbox() -> Any:
    """Starts the actor by which the driver and the workers talk, on this node."""
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return ray.remote(num_cpus=0, label_selector=here)(Mailbox).remote()
