"""``fleetpipe doctor --ray``: checks each node of a cluster as it checks a host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from fleetpipe.contrib import doctor
from fleetpipe.contrib.doctor import WRONG, Finding
from fleetpipe.contrib.ray import ray_cluster
from fleetpipe.errors import FleetPipeError


def findings(address: str, ranks: int, folder: Path) -> list[Finding]:
    """Checks every node: its packages, resources, folder and clock.

    Args:
        address: The address of the cluster, as for ``fleetpipe launch --ray``.
        ranks: The number of ranks for each node.
        folder: The folder of the checkpoints on each node.
    """
    try:
        with ray_cluster.connect(None if address == "local" else address, {"CPU": ranks}):
            ray_cluster.require_packages()
            return _of_nodes(ranks, folder)
    except FleetPipeError as error:
        return [Finding("ray", WRONG, str(error).splitlines()[0], str(error).splitlines()[-1])]


def _of_nodes(ranks: int, folder: Path) -> list[Finding]:
    def look(ranks: int, folder: str) -> tuple[float, list[Finding]]:
        return time.time(), doctor.findings_of_host(ranks, Path(folder))

    remote: Any = ray.remote(num_cpus=0)(look)
    listed: list[Finding] = []
    for node in ray_cluster.staying():
        # One after another: a clock is compared with that of here, around the call.
        begin = time.time()
        reference = remote.options(label_selector=node.label).remote(ranks, str(folder))
        (answer,) = ray_cluster.answers({node: reference}).values()
        clock, looks = answer
        listed += [one._replace(subject=f"{node.address} {one.subject}") for one in looks]
        listed.append(doctor.clock(node.address, begin - clock, clock - time.time()))
    return listed
