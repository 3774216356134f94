"""Makes the tasks of Slurm's ``srun`` the ranks of a job, without another launcher.

``srun`` tells each task its number, its node and the nodes of all (srun(1), "output environment
variables"). The port at which rank 0 serves the job's store is computed from the numbers of the job
and the step, so that all ranks know it. Start with ``adopt``.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe import log
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.transport import hosts

_log = log.logger(__name__)

#: The ports of the store: below the system's ephemeral ports, and those of Gloo's stores.
_PORTS = range(12000, 20000)
#: If another launcher has set one of these variables, ``adopt`` does nothing.
_RANK_VARIABLES = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS")

_START_BY_SRUN = "start the ranks by srun, and leave its SLURM_* variables as they are"

_RANGES = r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]"
_NODE = rf"(?:[^,\[\]\s]|{_RANGES})+"
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class _SlurmStep(NamedTuple):
    """A step of a Slurm job, which is one call of ``srun``, and this process in it.

    Attributes:
        job: The job's number.
        number: The number of the step in the job.
        rank: This process's number among the tasks.
        local: This process's number among the tasks of its node.
        nodes: The nodes' names.
        node_of_task: The number of the node that each task is on.
    """

    job: int
    number: int
    rank: int
    local: int
    nodes: Sequence[str]
    node_of_task: Sequence[int]


def adopt() -> None:
    """Makes this task of ``srun`` a rank, unless another launcher has done so.

    Sets the variables that Paddle's launcher would set, ``PADDLE_TRAINER_ID`` and others, in this
    process. If the user set ``PADDLE_MASTER=HOST:PORT``, rank 0 serves the job's store at that
    address of the first node. Rank 0 logs one line. Does nothing in a process that ``srun`` did not
    start, or started as a single task.

    Raises:
        ConfigError: Slurm's variables are incomplete or contradict each other, or the first node's
            name has no address.
    """
    if "SLURM_JOB_ID" not in os.environ or any(name in os.environ for name in _RANK_VARIABLES):
        return
    tasks = _require_number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default="1")
    if tasks == 1:
        return
    if not {"SLURM_STEP_ID", "SLURM_STEPID"} & os.environ.keys():
        job = os.environ["SLURM_JOB_ID"]
        log.once(
            _log.warning, f"one process within Slurm job {job}; srun would start its {tasks} tasks"
        )
        return
    step = _read_step(tasks)
    endpoints = _rank_endpoints(step)
    os.environ.update(hosts.rank_variables(step.rank, step.local, endpoints, step.node_of_task))
    _choose_device(step.local)
    log.once(
        _log.info,
        f"Slurm's job {step.job}, step {step.number}: {tasks} ranks on {len(step.nodes)} node(s), "
        f"rank 0 at {endpoints[0]}",
    )


def expand_nodes(listed: str) -> list[str]:
    """Returns the names in a list of nodes such as ``node[01-03,07],login``, in order.

    Args:
        listed: The list in Slurm's form: numbers in brackets are ranges, with leading zeros.
    """
    if not re.fullmatch(f"{_NODE}(?:,{_NODE})*", listed):
        raise _unreadable_error("list of nodes", "node[01-03,07],login", listed)
    names = []
    for node in re.finditer(_NODE, listed):
        # The even parts are outside of brackets, the odd ones inside.
        parts = re.split(_RANGES, node[0])
        choices = [_expand_ranges(part) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def expand_counts(counts: str) -> list[int]:
    """Returns the numbers in a list such as ``2(x3),1``: 2, 2, 2, 1.

    Args:
        counts: The tasks of each node in Slurm's form.
    """
    numbers: list[int] = []
    for part in counts.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise _unreadable_error("list of tasks for each node", "2(x3),1", counts)
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _expand_ranges(ranges: str) -> list[str]:
    """Returns the numbers of ranges such as ``01-03,07``, with their leading zeros."""
    ends = (part.partition("-")[::2] for part in ranges.split(","))
    return [
        str(number).zfill(len(first))
        for first, last in ends
        for number in range(int(first), int(last or first) + 1)
    ]


def _read_step(tasks: int) -> _SlurmStep:
    """Reads the step of this process from Slurm's variables."""
    nodes = expand_nodes(_require_variable("SLURM_STEP_NODELIST", "SLURM_NODELIST"))
    counts = expand_counts(
        _require_variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=str(tasks))
    )
    rank = _require_number("SLURM_PROCID")
    if len(counts) != len(nodes) or sum(counts) != tasks or rank >= tasks:
        raise ConfigError(
            "Slurm's variables do not fit together",
            got=f"task {rank} of {tasks}; nodes {', '.join(nodes)} with {counts} tasks",
            fix=_START_BY_SRUN,
        )
    node_of_task = _nodes_of_tasks(counts, os.environ.get("SLURM_DISTRIBUTION", "block"))
    node = _require_number("SLURM_NODEID", default=str(node_of_task[rank]))
    if node_of_task[rank] != node:
        raise ConfigError(
            f"Slurm's task {rank} is not on the node where it was looked for",
            expected=f"SLURM_NODEID={node_of_task[rank]}, as {counts} tasks of the nodes have it",
            got=f"SLURM_NODEID={node}",
            cause="a distribution of tasks other than block and cyclic",
            fix="srun --distribution=block",
        )
    job, local = _require_number("SLURM_JOB_ID"), _require_number("SLURM_LOCALID")
    number = _require_number("SLURM_STEP_ID", "SLURM_STEPID")
    return _SlurmStep(job, number, rank, local, nodes, node_of_task)


def _nodes_of_tasks(counts: Sequence[int], distribution: str) -> list[int]:
    """Returns the number of the node that each task is on.

    Args:
        counts: The number of tasks on each node.
        distribution: Slurm's distribution of tasks: block or cyclic.
    """
    if distribution.startswith("cyclic"):
        rounds = range(max(counts))
        return [node for n in rounds for node, count in enumerate(counts) if n < count]
    return [node for node, count in enumerate(counts) for _ in range(count)]


def _rank_endpoints(step: _SlurmStep) -> list[str]:
    """Returns an endpoint for each rank; only rank 0 listens at its own."""
    names = ["127.0.0.1"] if len(step.nodes) == 1 else [*step.nodes]
    # With srun --resv-ports Slurm reserves ports, such as "12000-12003".
    port = os.environ.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0]
    # Removed, because Paddle would start its own store at the same address.
    if chosen := os.environ.pop("PADDLE_MASTER", ""):
        names[0], _, port = chosen.rpartition(":")
    elif not port:
        port = str(_PORTS.start + (31 * step.job + step.number) % len(_PORTS))
    try:
        socket.getaddrinfo(names[0], int(port), socket.AF_INET)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"rank 0 cannot be reached at {names[0]}:{port}: {error}",
            expected="an IPv4 address of the first node, or a name that leads to it, and a port",
            fix="export PADDLE_MASTER=ADDRESS:PORT before srun",
        ) from error
    return [f"{names[node]}:{port}" for node in step.node_of_task]


def _choose_device(local: int) -> None:
    """Gives each task of a node another of the visible devices."""
    if device_kind() == "gpu":
        seen = paddle.device.cuda.device_count()
        chosen = os.environ.setdefault("FLAGS_selected_gpus", str(local % seen))
        # Paddle has chosen a device at the import, before the variable was set.
        paddle.device.set_device(f"gpu:{chosen.partition(',')[0]}")


def _require_variable(*names: str, default: str = "") -> str:
    """Returns the first of some environment variables that is set, or the default.

    Raises:
        ConfigError: None of them is set, and there is no default.
    """
    value = next(filter(None, map(os.environ.get, names)), default)
    if not value:
        raise ConfigError(f"Slurm did not set {' or '.join(names)}", fix=_START_BY_SRUN)
    return value


def _require_number(*names: str, default: str = "") -> int:
    """Returns the number in the first of some environment variables that is set, or the default."""
    text = _require_variable(*names, default=default)
    if not text.isdigit():
        raise _unreadable_error(f"{' or '.join(names)}", "3", text)
    return int(text)


def _unreadable_error(variable: str, example: str, got: str) -> ConfigError:
    """Returns the error for a variable of Slurm's that cannot be read."""
    return ConfigError(
        f"Slurm's variables hold no readable {variable}",
        expected=f"such as {example}",
        got=got,
        fix=_START_BY_SRUN,
    )
