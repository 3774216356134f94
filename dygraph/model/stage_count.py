"""How many stages a layer list is for, and the topology that its attributes show."""

from __future__ import annotations

from fleetpipe.aliases import Topology
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle, paddle_fleet


def number_of_stages(num_stages: int | None, topology: Topology, job: Job | None) -> int:
    """Returns the number of pipeline ranks, checked against the topology and the job.

    A model of one stage may be built within any job: each process then has all of it.

    Raises:
        ConfigError: It is not given, or twice and not the same.
        StateError: Several processes have not called ``fleet.init``.
    """
    if topology is None and num_stages is None:
        raise ConfigError(
            "PipelineLayer needs num_stages or topology",
            fix="pass topology=fleet.get_hybrid_communicate_group().topology()",
        )
    sources = {
        "num_stages": num_stages,
        "topology": None if topology is None else topology.get_dim("pipe"),
    }
    numbers = {name: int(value) for name, value in sources.items() if value is not None}
    if job is not None and set(numbers.values()) != {1}:
        numbers["pp_degree of fleet.init"] = job.degrees.pp
    if len(set(numbers.values())) > 1:
        without_degrees = job is not None and job.degrees.pp == 1
        raise ConfigError(
            "the number of pipeline stages is given twice, and differs",
            got=", ".join(f"{name}={value}" for name, value in numbers.items()),
            cause="fleet.init was given no strategy, or one whose hybrid_configs were set later"
            if without_degrees
            else None,
            fix="set strategy.hybrid_configs = {'pp_degree': ..}, then call "
            "fleet.init(is_collective=True, strategy=strategy)"
            if without_degrees
            else "pass only topology=fleet.get_hybrid_communicate_group().topology()",
        )
    stages = next(iter(numbers.values()))
    processes = meeting.world_size()
    if job is None and stages > 1 and processes > 1:
        raise StateError(
            f"a PipelineLayer of {stages} stages was built before fleet.init",
            got=f"a job of {processes} processes, none of which knows its stage",
            fix="call fleet.init(is_collective=True, strategy=strategy) first",
        )
    return stages


def topology_of(topology: Topology, stages: int, job: Job | None) -> Topology:
    """Returns the topology of a model: the one given, the job's, or one of data and pipe alone.

    Args:
        topology: What the user passed; None for nothing.
        stages: The number of pipeline ranks.
        job: The current job.
    """
    if topology is not None:
        return topology
    if job is not None and job.degrees.pp == stages:
        return job.hcg.topology()
    replicas = max(1, paddle.distributed.get_world_size() // stages)
    return paddle_fleet.CommunicateTopology(["data", "pipe", "model"], [replicas, stages, 1])
