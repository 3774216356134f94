"""``fleetpipe launch --ray``: an unedited script on the nodes of a Ray cluster.

This process, the driver, decides as the local launcher does: which nodes take part in an attempt,
and whether there is another one. Ray Train starts the workers, one for each rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import ActorUnavailableError

from fleetpipe import systems
from fleetpipe.contrib.ray import nodes
from fleetpipe.contrib.ray.cluster import connected
from fleetpipe.contrib.ray.group import WorkerGroup, mailbox
from fleetpipe.contrib.ray.nodes import ClusterSize
from fleetpipe.contrib.ray.state_stores import StateStores
from fleetpipe.contrib.watch.address import SERVE
from fleetpipe.errors import FleetPipeError, reason
from fleetpipe.job import attempt_files
from fleetpipe.job.watching.watch import EXIT_CODE
from fleetpipe.launch import log_filter
from fleetpipe.launch.script import in_a_shell
from fleetpipe.launch.supervisor.attempts import Attempt, End, Verdict, after, interrupted, judge
from fleetpipe.launch.supervisor.local_ranks import record
from fleetpipe.launch.supervisor.signals import BREAK_SIGNALS, Signals, caught
from fleetpipe.launch.supervisor.state_folder import state_folder
from fleetpipe.launch.supervisor.supervisor import say

#: Seconds that ranks may take to end by themselves after one has failed.
END_SECONDS = 8.0
#: Seconds that workers may take to be there.
START_SECONDS = 300.0
#: Seconds in which Ray notices that a node is gone.
LOST_SECONDS = 20.0
#: Seconds that workers may take to leave.
LEAVE_SECONDS = 10.0
_TURN_SECONDS = 0.1
_LOOK_SECONDS = 1.0
#: Variables that ranks find as the driver has them; of others a node's own go first.
_CARRIED = ("FLEETPIPE_", "PADDLE_", "FLAGS_", "GLOG_", "GLOO_", "NCCL_", "OMP_", "MKL_", "PYTHON")
#: Variables that are a process's own, or a host's.
_KEPT_BACK = ("RAY_", "LD_", "SLURM_")
#: What Ray Train is told by the environment, where the user has said nothing else.
_RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    # The driver looks for nodes that are about to be taken away.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


class Driver:
    """One job, from its first attempt to its last."""

    def __init__(self, options: argparse.Namespace, folder: Path, signals: Signals) -> None:
        """Drives a job on the cluster that this process is connected to.

        Args:
            options: Of the command.
            folder: A folder for what the job leaves while it runs.
            signals: What asks the job to stop.
        """
        self._options = options
        self._folder = folder
        self._signals = signals
        self._resource = nodes.resource()
        gpus = [node.places for node in nodes.staying("GPU") if node.places]
        self._size = ClusterSize(options.nnodes, options.nproc_per_node or min(gpus, default=1))
        self._mailbox = mailbox()
        self._stores = StateStores(self._mailbox)
        self._next_reports = self._mailbox.reports.remote()
        self._group: WorkerGroup | None = None
        self._checked: set[str] = set()
        self._refused: set[str] = set()
        self._groups = 0
        #: The first signal that asked the job to stop.
        self._stopped_by: int | None = None
        #: Why ranks were asked to save and end although the job goes on.
        self._resized: str | None = None
        self._deadline: float | None = None
        self._looked = 0.0

    def run(self) -> int:
        """Runs one attempt after another; returns the exit code of the job."""
        attempt = Attempt()
        try:
            while place := self._gather(attempt):
                verdict = interrupted(self._attempt(attempt.number, place), self._stopped_by)
                record(self._home(attempt.number), attempt.number, verdict)
                limit = self._options.max_restart
                then = after(attempt, verdict, limit, self._stopped_by, self._resized)
                for text in then.said:
                    say(text)
                if isinstance(then, End):
                    return then.code
                attempt = then.attempt
        except _Unplaced as error:
            say(str(error))
            return attempt_files.PREEMPTED if attempt.failed is None else attempt.failed.code
        finally:
            if self._group is not None:
                self._group.leave(LEAVE_SECONDS)
        return in_a_shell(-(self._stopped_by or signal.SIGTERM))

    def _gather(self, attempt: Attempt) -> list[str]:
        """Waits until there are nodes for an attempt.

        Returns:
            The name of each rank's node; none where the job was asked to stop.

        Raises:
            ConfigError: For the first attempt there are too few, or one cannot take part.
            TransportError: For the first attempt, one cannot reach another.
        """
        begun = time.monotonic()
        while self._stopped_by is None:
            place = self._place()
            new = set(place) - self._checked
            if new:
                there = nodes.staying(self._resource)
                part = [node for node in there if node.name in place]
                try:
                    nodes.check(part, self._options.script.absolute())
                except FleetPipeError as error:
                    if attempt.number == 1:
                        raise
                    # One that has come since must not end a job that others can go on with.
                    say(str(error))
                    self._refused |= new
                    continue
                self._checked |= new
            if place:
                return place
            if time.monotonic() - begun > self._options.wait:
                there = nodes.staying(self._resource)
                small = nodes.too_few(there, self._size, self._resource)
                raise small if attempt.number == 1 else _Unplaced(str(small))
            self._turn()
        return []

    def _place(self) -> list[str]:
        before = self._group.nodes if self._group is not None else ()
        there = nodes.staying(self._resource)
        fit = [node for node in there if node.name not in self._refused]
        return nodes.placed(fit, self._size, before)

    def _attempt(self, number: int, place: list[str]) -> Verdict:
        """Runs one attempt to its end."""
        self._deadline = self._resized = None
        group = self._workers(place)
        late = time.monotonic() + START_SECONDS
        while not group.over and len(group.ready) < len(place):
            self._turn()
            if self._stopped_by is not None:
                return Verdict(in_a_shell(-self._stopped_by), culprit="it was asked to stop")
            if time.monotonic() > late:
                return Verdict(1, culprit=f"no workers in {START_SECONDS:g} s", gone=True)
        if group.over:
            return self._lost(group)
        group.begin(self._described(number, self._kept(number, place)))
        while not group.over and len(group.ended) < len(place):
            self._turn()
            self._kill_if_late(group)
            self._move(group)
            if any(ended.code for ended in group.ended.values()) and self._deadline is None:
                self._deadline = time.monotonic() + END_SECONDS
        whole = len(group.ended) == len(place)
        return self._judge(group, number) if whole else self._lost(group)

    def _workers(self, place: list[str]) -> WorkerGroup:
        """Returns workers on these nodes: those that there are, or others."""
        group = self._group
        if group is not None and (group.over or group.nodes != place):
            group.leave(LEAVE_SECONDS)
            group = None
        if group is None:
            self._groups += 1
            runs = self._folder / "ray"
            group = WorkerGroup(self._groups, place, self._resource, self._mailbox, runs)
        self._group = group
        return group

    def _described(self, number: int, kept: list[str]) -> dict[str, Any]:
        options = self._options
        level = options.log_level
        here = log_filter.environment(level)
        if options.checkpoint_dir is not None:
            here["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(options.checkpoint_dir)
        carried = {name: here[name] for name in here if name.startswith(_CARRIED)}
        return {
            "number": number,
            "words": ["run", "--log-level", level, str(options.script), *options.arguments],
            "folder": os.getcwd(),
            "logs": os.path.abspath(options.log_dir),
            # Ray sets the number of threads in its workers, which changes the bits of a product.
            "environment": {"OMP_NUM_THREADS": None, **carried},
            "beside": {name: here[name] for name in here if not name.startswith(_KEPT_BACK)},
            "kept": kept,
        }

    def _kept(self, number: int, place: list[str]) -> list[str]:
        if not self._options.keep_state:
            return []
        alive = [node.name for node in nodes.staying(self._resource)]
        return self._stores.begin(number, self._groups, place, alive)

    def _home(self, number: int) -> Path:
        return self._folder / f"attempt-{number}"

    def _judge(self, group: WorkerGroup, number: int) -> Verdict:
        """Judges an attempt that has ended on all ranks, by what these have left."""
        home = self._home(number)
        home.mkdir()
        for rank, ended in group.ended.items():
            for name, content in ended.files.items():
                with (home / name).open("ab") as file:
                    file.write(content)
            attempt_files.note_start(home, rank, 0)
            attempt_files.note_end(home, rank, ended.code)
        codes = [ended.code for ended in group.ended.values() if ended.code]
        culprits = [code for code in codes if code != EXIT_CODE]
        return judge(home, in_a_shell([*culprits, *codes, 0][0]))

    def _lost(self, group: WorkerGroup) -> Verdict:
        """Judges an attempt whose workers Ray has given up."""
        failures = getattr(group.error, "worker_failures", {})
        lost = {group.nodes[rank] for rank, failure in failures.items() if _unreached(failure)}
        late = time.monotonic() + LOST_SECONDS
        # Ray soon knows whether a node is gone, and until then would start workers there again.
        while lost and time.monotonic() < late:
            self._turn()
            lost &= {node.name for node in nodes.staying(self._resource)}
        living = {node.name: node.address for node in nodes.staying(self._resource)}
        verdict = Verdict(1, step=group.step)
        for rank in sorted(failures):
            if group.nodes[rank] not in living:
                return replace(verdict, culprit=f"the node of rank {rank} is gone", gone=True)
        for rank, failure in sorted(failures.items()):
            who = f"the worker of rank {rank} on {living[group.nodes[rank]]}"
            raised = getattr(failure, "_base_exc", None)
            if raised is not None:
                return replace(verdict, culprit=f"{who} raised: {reason(raised)}", raised=True)
            what = "was ended: by a signal, or for want of memory"
            return replace(verdict, culprit=f"{who} {what}")
        error = getattr(group.error, "controller_failure", group.error)
        what = "nothing is said of it" if error is None else reason(error)
        return replace(verdict, culprit=f"Ray gave the workers up: {what}", gone=True)

    def _turn(self) -> None:
        """Waits for what comes next, and does what it asks for."""
        if ray.wait([self._next_reports], timeout=_TURN_SECONDS)[0]:
            if self._group is not None:
                self._group.take(ray.get(self._next_reports))
                self._show(self._group)
            self._next_reports = self._mailbox.reports.remote()
        for number in self._signals.take():
            self._stop_for(number)

    def _show(self, group: WorkerGroup) -> None:
        for output in group.output:
            sys.stdout.buffer.write(output)
        sys.stdout.flush()
        group.output.clear()

    def _stop_for(self, number: int) -> None:
        """Has all ranks save and end, or just end."""
        again, self._stopped_by = self._stopped_by, self._stopped_by or number
        if number in BREAK_SIGNALS and again is not None:
            self._deadline = time.monotonic()
        elif self._deadline is None:
            if self._stopped_by in BREAK_SIGNALS:
                say("interrupted: the step is finished and saved; once more ends it at once")
            self._stop(number)

    def _stop(self, number: int = signal.SIGTERM) -> None:
        self._deadline = time.monotonic() + self._options.grace
        if self._group is not None:
            self._group.signal(number)

    def _kill_if_late(self, group: WorkerGroup) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            group.signal(systems.SIGKILL)

    def _move(self, group: WorkerGroup) -> None:
        """Ends an attempt that other nodes would suit better, after a step that is saved."""
        now = time.monotonic()
        if group.step is None or self._deadline is not None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if group.replica is not None:
            ranks, alone = group.replica
            self._size = self._size._replace(replica=ranks, alone=alone)
        staying = {node.name for node in nodes.staying(self._resource)}
        if not staying.issuperset(group.nodes):
            self._resized = "a node is about to be taken away"
        elif len(self._place()) > len(group.nodes):
            self._resized = "more nodes have come"
        if self._resized is not None:
            self._stop()


def _unreached(failure: object) -> bool:
    """Whether a worker may have gone with its node: it is not known to have died."""
    return isinstance(getattr(failure, "health_check_failure", None), ActorUnavailableError)


class _Unplaced(Exception):
    """A job that has begun has too few nodes to go on."""


def run(options: argparse.Namespace) -> int:
    """Runs a job on a Ray cluster to its end; exit codes are those of the local launcher.

    Raises:
        ConfigError: The cluster has too few nodes, or one cannot take part.
        TransportError: There is no Ray at the address, or nodes cannot reach each other.
    """
    for name, value in _RAY_TRAIN.items():
        os.environ.setdefault(name, value)
    # What the first rank says is shown as it is; what Ray says is in its own logs.
    ray_worker.print_worker_logs = lambda *_: None
    if options.serve is not None:
        # The first rank serves, on its node.
        os.environ[SERVE] = str(options.serve)
    with ExitStack() as ends:
        folder = ends.enter_context(state_folder())
        # Before the connection: a signal that comes while that begins or ends interrupts neither.
        signals = ends.enter_context(caught())
        address = None if options.ray == "local" else options.ray
        ends.enter_context(connected(address, {"CPU": options.nproc_per_node or 1}))
        logging.getLogger("ray").setLevel(logging.ERROR)
        return Driver(options, folder, signals).run()
