"""This host's part of a life: its ranks, their folder, and how they ended."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fleetpipe.job import life
from fleetpipe.launch.keeping.copies import Copies
from fleetpipe.launch.keeping.places import Claim
from fleetpipe.launch.script import LAUNCHED, signal_ranks
from fleetpipe.launch.supervisor.pods import Order, Pods, end_sessions
from fleetpipe.launch.supervisor.verdict import Verdict, judge
from fleetpipe.report import files


class Place(NamedTuple):
    """A host's place in a life.

    Attributes:
        life: The number of the life.
        nodes: Hosts that take part.
        node: The number of this one.
        master: Where the launchers of the life meet, on the first host; unused where it is alone.
        mark: A number that no other life has, where states are copied to neighbours.
        neighbour: Where this host's states are copied to; "" where they are not.
    """

    life: int
    nodes: int = 1
    node: int = 0
    master: str = ""
    mark: int = 0
    neighbour: str = ""


class Local:
    """The ranks of this host, one life after another."""

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        pods: Pods,
        address: str,
        copies: Copies | None = None,
    ) -> None:
        """Describes them; starts none.

        Args:
            options: Of the command.
            folder: The supervisor's folder in memory.
            pods: The process in which Paddle's launcher runs.
            address: Of this host, as the other ones reach it; unused where it is alone.
            copies: This host's part in the copies of states; None where there are none.
        """
        self._options = options
        self._folder = folder
        self._pods = pods
        self._address = address
        self._copies = copies
        #: The place that this host has, or had last.
        self.claim = Claim()
        self._kept = folder / "kept"
        self._kept.mkdir()
        self._home: Path | None = None
        self._killed = False

    @property
    def running(self) -> bool:
        """Whether a life runs."""
        return self._home is not None

    @property
    def step(self) -> int | None:
        """The step that some rank is in; None where no life runs, or none has begun a step."""
        begun = {} if self._home is None else life.steps_begun(self._home)
        return max(begun.values(), default=None)

    def fileno(self) -> int:
        """Returns the descriptor that can be read when a life has ended."""
        return self._pods.fileno()

    def start(self, place: Place) -> None:
        """Begins a life."""
        self._killed = False
        self._home = self._home_of(place.life)
        self._home.mkdir()
        self.claim = Claim(place.life, place.nodes, place.node)
        if self._copies is not None:
            self._copies.begin(self.claim, place.mark, place.neighbour, self._home)
        self._pods.start(Order(self._arguments(place), self._environment(place.life, self._home)))

    def end(self) -> Verdict:
        """Judges the life, once it has ended, and ends what is left of it."""
        home, self._home = self._home, None
        if home is None:
            raise RuntimeError("no life has begun since the last one was judged")
        if self._copies is not None:
            self._copies.end()
        try:
            verdict = judge(home, self._pods.code())
            # Who was killed from here did not fail first.
            return replace(verdict, own=verdict.own and not self._killed)
        finally:
            end_sessions(home)

    def record(self, number: int, verdict: Verdict) -> None:
        """Writes how a life ended where its run is recorded, for ``fleetpipe report``."""
        end = {
            "event": "end",
            "life": number,
            "time": time.time(),
            "code": verdict.code,
            "saved": verdict.saved,
            "step": verdict.step,
            "culprit": verdict.culprit,
            "details": verdict.details,
        }
        for folder in life.records(self._home_of(number)):
            # A disk that is full must not keep the job from being started again.
            with contextlib.suppress(OSError):
                files.append_line(folder / files.LIVES, end)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks the ranks to finish their step, save and end, by a signal."""
        if self._home is not None:
            signal_ranks(self._home, number)

    def kill(self) -> None:
        """Ends the ranks at once, and a launcher that has not started any."""
        if self._home is not None:
            self._killed = True
            signal_ranks(self._home, signal.SIGKILL)
            self._pods.stop()

    def _home_of(self, number: int) -> Path:
        return self._folder / f"life-{number}"

    def _arguments(self, place: Place) -> list[str]:
        options = self._options
        words = ["--log_dir", options.log_dir, "--log_level", options.log_level]
        if options.nproc_per_node is not None:
            words += ["--nproc_per_node", str(options.nproc_per_node)]
        if place.nodes > 1:
            words += ["--nnodes", str(place.nodes), "--rank", str(place.node)]
            words += ["--master", place.master, "--host", self._address]
        words += [str(LAUNCHED), "run", "--log-level", options.log_level]
        return [*words, str(options.script), *options.arguments]

    def _environment(self, number: int, home: Path) -> dict[str, str]:
        found = {life.FOLDER: str(home), life.NUMBER: str(number)}
        if self._options.checkpoint_dir is not None:
            found["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(self._options.checkpoint_dir)
        if self._options.keep_state:
            found["FLEETPIPE_KEPT_STATE"] = str(self._kept)
        return found
