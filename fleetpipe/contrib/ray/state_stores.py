"""Kept states on the nodes of a cluster: each node's outlive its workers, and the node by copies.

An actor on each node owns the folder in which the ranks there keep their states. Every few steps
it copies the state of each of them, for itself and for the actor of the next node; Ray's object
store moves the bytes. Older copies go when all ranks have the step. After a node is lost the driver
has the newest step that is complete placed where the ranks are next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from fleetpipe.contrib.kept_state import copies
from fleetpipe.contrib.ray.mailbox import WorkerReport
from fleetpipe.contrib.ray.worker import keeper_process
from fleetpipe.errors import CheckpointError, FleetPipeError
from fleetpipe.launch.supervisor.state_folder import state_folder
from fleetpipe.launch.supervisor.supervisor import say

#: Seconds in which an actor answers, and states are moved from node to node.
_ANSWER_SECONDS = 60.0
_MOVE_SECONDS = 300.0


class CopyKey(NamedTuple):
    """Which state a copy is of: of later attempts and steps the newer one."""

    attempt: int
    step: int
    rank: int


class Begun(NamedTuple):
    """What the actors need to know of an attempt.

    Attributes:
        attempt: Its number.
        group: The number of the group of workers.
        ranks: How many ranks it has.
        stores: The actors, one for each node that takes part, in the order of the ranks.
        keeps: Attempt and step of the copies that stay, if there are any.
    """

    attempt: int
    group: int
    ranks: int
    stores: Sequence[Any]
    keeps: tuple[int, int] | None


class StateStore:
    """The kept states of one node: an actor there."""

    def __init__(self, mailbox: Any) -> None:
        """Makes the folder, which goes with this process however that ends."""
        self._mailbox = mailbox
        self._ends = contextlib.ExitStack()
        folder = self._ends.enter_context(state_folder())
        self._ends.enter_context(keeper_process(folder))
        self._kept, self._held = folder / "kept", folder / "copies"
        self._kept.mkdir()
        self._held.mkdir()
        self._changed = asyncio.Condition()
        self._stopped = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Begins to take requests of ranks; returns the folder in which they keep their states."""
        at = self._kept / copies.SOCKET
        await asyncio.start_unix_server(self._serve, at)  # type: ignore[attr-defined,unused-ignore]
        return str(self._kept)

    async def begin(self, begun: Begun, stay: Sequence[int], index: int | None) -> None:
        """Readies the store for an attempt.

        Args:
            begun: The attempt.
            stay: Ranks that were here in the attempt before, and are here again.
            index: Of this store among those of the attempt; None: no rank is here.
        """
        self._begun = begun
        #: This one, and the one before it in the ring of all.
        self._holders = [] if index is None else [begun.stores[index], begun.stores[index - 1]]
        self._stopped = len(begun.stores) < 2
        #: Which ranks' states two nodes hold, by step; the newest step of which they hold all; and
        #: the newest that each rank here has asked for.
        self._copied: dict[int, set[int]] = {}
        self._complete = -1
        self._requested: dict[int, int] = {}
        # What ranks kept that have been elsewhere since would be mixed with what they do next.
        for file in self._kept.glob("rank-*"):
            if int(file.stem.partition("-")[2]) not in stay:
                file.unlink()
        self._drop(lambda key: key[:2] != begun.keeps)

    async def held(self) -> list[CopyKey]:
        """Returns which copies are here."""
        return [*map(_key, self._held.iterdir())]

    async def copy(self, key: CopyKey) -> copies.Copy:
        """Returns a copy that is here.

        Raises:
            CheckpointError: Its file has the state of another step.
        """
        slot = copies.find([self._held / _name(key)], key.step)
        if slot is None:
            raise CheckpointError(
                f"the copy of rank {key.rank}'s state has no step {key.step}",
                fix="nothing: the ranks go on from the newest checkpoint",
            )
        return slot[1]

    async def place(self, rank: int, step: int, copy: copies.Copy) -> None:
        """Makes a copy what a rank goes on from here."""
        copies.place(self._kept, rank, step, copy)

    async def hold(self, key: CopyKey, copy: copies.Copy) -> None:
        """Holds a copy of a state, of this attempt."""
        if key.attempt == self._begun.attempt:
            copies.write(self._held / _name(key), key.step, copy)

    async def note(self, key: CopyKey) -> None:
        """Notes that a state is held by two nodes; drops older ones where that completes a step."""
        if key.attempt != self._begun.attempt:
            return
        having = self._copied.setdefault(key.step, set())
        having.add(key.rank)
        if len(having) == self._begun.ranks:
            self._copied = {n: ranks for n, ranks in self._copied.items() if n > key.step}
            self._drop(lambda other: other[:2] < key[:2])
            async with self._changed:
                self._complete = key.step
                self._changed.notify_all()

    async def stop(self, attempt: int) -> None:
        """Makes no more copies in an attempt."""
        if attempt == self._begun.attempt:
            async with self._changed:
                self._stopped = True
                self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a rank, by the end of the connection, when its state is read."""
        rank, step = map(int, (await reader.readline()).split())
        try:
            await self._read(CopyKey(self._begun.attempt, step, rank))
        finally:
            writer.close()

    async def _read(self, key: CopyKey) -> None:
        # One step is copied at a time: until all ranks have it, the one before is not dropped.
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._stopped or self._requested.get(key.rank, -1) <= self._complete
            )
        slot = copies.find(self._kept.glob(f"rank-{key.rank}.*"), key.step)
        if self._stopped or slot is None:
            return
        self._requested[key.rank] = key.step
        slots, copy = slot
        try:
            held = ray.put(copy)
        except RayError as error:
            await self._give_up(key, error)
            return
        if slots.slot_of(key.step) is not None:
            task = asyncio.create_task(self._spread(key, held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _spread(self, key: CopyKey, copy: Any) -> None:
        try:
            await asyncio.gather(*(store.hold.remote(key, copy) for store in self._holders))
            await asyncio.gather(*(store.note.remote(key) for store in self._begun.stores))
        except (FleetPipeError, RayError) as error:
            await self._give_up(key, error)

    async def _give_up(self, key: CopyKey, error: Exception) -> None:
        """Has training go on without copies. Where a node is lost the attempt ends by itself."""
        for store in self._begun.stores:
            store.stop.remote(key.attempt)
        if not isinstance(error, RayActorError):
            line = f"fleetpipe: states are copied to no other host any more: {_summary(error)}\n"
            report = WorkerReport(self._begun.group, key.rank, "output", line.encode())
            await self._mailbox.report.remote(report)

    def _drop(self, goes: Callable[[CopyKey], bool]) -> None:
        for file in self._held.iterdir():
            if goes(_key(file)):
                file.unlink()


def _name(key: CopyKey) -> str:
    return "-".join(map(str, key))


def _key(file: Path) -> CopyKey:
    return CopyKey(*map(int, file.name.split("-")))


class StateStores:
    """The driver's side: the stores of all nodes."""

    def __init__(self, mailbox: Any) -> None:
        """Starts none yet; they report to the driver's mailbox."""
        self._mailbox = mailbox
        self._stores: dict[str, Any] = {}
        self._folders: dict[str, str] = {}
        self._nodes: list[str] = []

    def begin(self, attempt: int, group: int, nodes: list[str], alive: Container[str]) -> list[str]:
        """Readies the nodes for an attempt, with the newest states that are kept of all ranks.

        Args:
            attempt: Its number.
            group: The number of its group of workers.
            nodes: Of each rank.
            alive: All nodes that are there.

        Returns:
            The folder in which each rank keeps its states; none at all where a node cannot.
        """
        for node in [node for node in self._stores if node not in alive]:
            del self._stores[node]
        try:
            return self._begin(attempt, group, nodes)
        except (FleetPipeError, RayError) as error:
            say(f"attempt {attempt} keeps no states in memory: {_summary(error)}")
            self._nodes = []
            return []

    def _begin(self, attempt: int, group: int, nodes: list[str]) -> list[str]:
        for node in dict.fromkeys(nodes):
            if node not in self._stores:
                here = {"ray.io/node-id": node}
                actor = ray.remote(num_cpus=0, label_selector=here)(StateStore)
                self._stores[node] = actor.remote(self._mailbox)
                self._folders[node] = _answers([self._stores[node].open.remote()])[0]
        before, self._nodes = self._nodes, nodes
        holders = self._holders(len(nodes))
        newest = max((key[:2] for key in holders), default=None)
        part = [*dict.fromkeys(nodes)]
        stores = [self._stores[node] for node in part]
        begun = Begun(attempt, group, len(nodes), stores, newest)
        same = range(len(nodes)) if len(before) == len(nodes) else ()
        readied = []
        for node, store in self._stores.items():
            stay = [rank for rank in same if before[rank] == nodes[rank] == node]
            index = part.index(node) if node in part else None
            readied.append(store.begin.remote(begun, stay, index))
        _answers(readied)
        if newest is not None and before != nodes:
            placed = []
            for rank, node in enumerate(nodes):
                key = CopyKey(*newest, rank)
                copy = holders[key].copy.remote(key)
                placed.append(self._stores[node].place.remote(rank, key.step, copy))
            _answers(placed, _MOVE_SECONDS)
        return [self._folders[node] for node in nodes]

    def _holders(self, ranks: int) -> dict[CopyKey, Any]:
        """Returns who has the copies of each step that is complete for as many ranks."""
        stores = [*self._stores.values()]
        keys = _answers([store.held.remote() for store in stores])
        holders = {key: store for held, store in zip(keys, stores) for key in held}
        steps: dict[tuple[int, int], set[int]] = {}
        for key in holders:
            steps.setdefault(key[:2], set()).add(key.rank)
        return {key: holders[key] for key in holders if steps[key[:2]] == {*range(ranks)}}


def _answers(references: list[Any], seconds: float = _ANSWER_SECONDS) -> list[Any]:
    answers: list[Any] = ray.get(references, timeout=seconds)
    return answers


def _summary(error: Exception) -> str:
    """Returns the first line of an error, or of the one that an actor raised."""
    return str(getattr(error, "cause", error)).partition("\n")[0]
