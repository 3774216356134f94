"""One save after another: agreed on by all ranks, written by each, at once or by a thread."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetpipe import log, systems
from fleetpipe.checkpoint.contents import replicas, training_state
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import Held, Name
from fleetpipe.checkpoint.files import host_memory, run_folder
from fleetpipe.checkpoint.files.host_memory import Snapshot
from fleetpipe.checkpoint.files.manifest import Manifest
from fleetpipe.checkpoint.files.plan import Inventory, Plan, indexes, planned
from fleetpipe.checkpoint.files.run_folder import Retention
from fleetpipe.checkpoint.files.writer import Assignment, described_files, own_parts, write
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import CheckpointError
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.version import __version__

_log = log.logger(__name__)

#: A value of JSON.
Json = Any
#: What the writer's thread has: a tenth of a processor that another thread wants as well.
_NICE = 10
#: Returns the bytes of this rank's part of a tensor.
BytesOf = Callable[[Name], memoryview]


class Saving:
    """A save that has begun.

    Attributes:
        step: The step that is saved.
    """

    def __init__(self, saver: Saver, step: int) -> None:
        """Belongs to the saver that has begun it."""
        self._saver = saver
        self.step = step

    def wait(self) -> None:
        """Waits until the step is on the disk. Collective over the job where it is not yet known.

        Raises:
            CheckpointError: Some rank could not write it; every rank raises.
        """
        self._saver.settle(wait=True)


class _Writing:
    """What this rank writes of a step, in a thread or at once."""

    def __init__(self, task: Assignment, bytes_of: BytesOf) -> None:
        self.task = task
        self._bytes_of = bytes_of
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread has not come to its end."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Writes in a thread, which the process waits for before it ends."""
        self._thread = threading.Thread(target=self._run_aside, name="fleetpipe checkpoint writer")
        self._thread.start()

    def _run_aside(self) -> None:
        """Writes while those who train have nothing to compute, as far as they leave time."""
        systems.lower_priority(_NICE)
        self.run()

    def run(self) -> None:
        """Writes."""
        try:
            write(self.task, self._bytes_of)
        except Exception as error:  # told to all ranks by settle
            self._error = error

    def run_with(self, ranks: Ranks, elsewhere: Sequence[int]) -> None:
        """Writes, and rank 0 what the ranks hold that do not see its folder. Collective.

        Args:
            ranks: All of them.
            elsewhere: Those, as on storage that hosts do not share. They send rank 0 their parts,
                of which it has one rank's in memory at a time.

        Raises:
            PeerFailed: Some rank died.
            PipelineTimeout: Some rank did not come within the limit.
        """
        if ranks.rank in elsewhere:
            own = own_parts(self.task.plan, ranks.rank)
            ranks.give(self._bytes_of(name) for name, _, _ in own)
            return
        self.run()
        for rank in elsewhere if ranks.rank == 0 else ():
            theirs = own_parts(self.task.plan, rank)
            parts = {name: Held(ranks.take(rank)) for name, _, _ in theirs}
            of_rank = _Writing(replace(self.task, rank=rank), _bytes_in(parts))
            of_rank.run()
            self._error = self._error or of_rank._error

    def end(self) -> None:
        """Waits for the thread, as long as the disk takes, and raises what it could not do."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class Saver:
    """Saves steps of a run, of which at most one is being written."""

    def __init__(self, home: Path, retention: Retention, in_background: bool) -> None:
        """Describes how.

        Args:
            home: The folder of the run.
            retention: Which steps are kept.
            in_background: Whether a thread writes copies.
        """
        self._home = home
        self._retention = retention
        self._in_background = in_background
        #: The plan of what the ranks hold, and the texts that follow from it.
        self._plans: dict[tuple[str, ...], tuple[Plan, dict[str, str]]] = {}
        self._snapshot = Snapshot()
        self._writing: tuple[Ranks, _Writing] | None = None
        self._cleaned = False

    @dynamic_mode()
    def save(
        self,
        ranks: Ranks,
        step: int,
        objects: Objects,
        metrics: Mapping[str, float],
        extra: Mapping[str, Any],
    ) -> Saving:
        """Saves a step; none is being written. Collective over ``ranks``.

        Raises:
            CheckpointError: Some rank cannot; every rank raises.
        """
        model = objects.required_model()
        optimizer = objects.optimizer_part(model)
        of_optimizer = {} if optimizer is None else optimizer.held()
        what = f"saving step {step}"
        held = replicas.with_own(ranks, what, {**model.held(), **of_optimizer})

        def facts() -> dict[str, Json]:
            state = objects.training_state(model).taken()
            state["extra"] = training_state.plain(extra, "extra")
            inventory = Inventory.of(held).to_json()
            return {
                "step": step,
                "digest": hashlib.sha256(inventory.encode()).hexdigest(),
                "state": training_state.to_text(state),
                "place": ranks.place,
                "draft": self._make_draft(step) if ranks.rank == 0 else "",
            }

        everyone = ranks.together(what, facts)
        draft = self._home / everyone[0]["draft"]
        try:
            digests = [facts["digest"] for facts in everyone]
            plan, planned_texts = self._planned(ranks, what, digests, held)
            texts = {**planned_texts, training_state.FILE: _merged_state(step, everyone)}
            task = Assignment(
                home=self._home,
                draft=draft,
                plan=plan,
                rank=ranks.rank,
                ranks=ranks.count,
                manifest=Manifest(
                    step=step,
                    files=described_files(plan, texts),
                    tensors={},
                    order=model.order(),
                    optimizer=None if optimizer is None else optimizer.kind,
                    metrics=training_state.plain(metrics, "metrics"),
                    layout=ranks.layout,
                    versions={"fleetpipe": __version__, "paddle": VERSION},
                ),
                texts=texts,
                published=self._retention.apply,
            )
        except CheckpointError:
            if ranks.rank == 0:
                run_folder.remove_draft(draft)
            raise
        self._begin(ranks, task, held)
        return Saving(self, step)

    @dynamic_mode()
    def settle(self, wait: bool) -> None:
        """Ends the save that is being written, if there is one. Collective over its ranks.

        Args:
            wait: Whether to wait for it; else nothing happens as long as some rank writes.

        Raises:
            CheckpointError: Some rank could not write; every rank raises.
        """
        if self._writing is None:
            return
        ranks, writing = self._writing
        what = f"saving step {writing.task.manifest.step}"
        if not wait and any(ranks.together(what, lambda: writing.running)):
            return
        self._writing = None
        try:
            ranks.together(what, writing.end)
        except CheckpointError:
            if ranks.rank == 0:
                run_folder.remove_draft(writing.task.draft)
            raise

    def finish(self) -> None:
        """Waits for what this rank writes, without the others; a failure is logged alone."""
        if self._writing is not None:
            try:
                self._writing[1].end()
            except Exception as error:
                step = self._writing[1].task.manifest.step
                _log.warning("step %d was not saved by this rank: %s", step, error)

    def _make_draft(self, step: int) -> str:
        self._home.mkdir(parents=True, exist_ok=True)
        if not self._cleaned:
            run_folder.remove_drafts(self._home)
            self._cleaned = True
        draft = run_folder.draft_of(self._home, step, uuid.uuid4().hex[:8])
        draft.mkdir()
        return draft.name

    def _planned(
        self, ranks: Ranks, what: str, digests: Sequence[str], held: Mapping[Name, Held]
    ) -> tuple[Plan, dict[str, str]]:
        """Returns the plan, which is made once for as long as no rank holds something else."""
        key = tuple(digests)
        if key not in self._plans:
            texts = ranks.together(what, lambda: Inventory.of(held).to_json())
            plan = planned([Inventory.from_json(text) for text in texts])
            self._plans = {key: (plan, indexes(plan))}
        return self._plans[key]

    def _begin(self, ranks: Ranks, task: Assignment, held: Mapping[Name, Held]) -> None:
        sees = ranks.together(f"saving step {task.manifest.step}", task.draft.is_dir)
        elsewhere = [rank for rank, here in enumerate(sees) if not here]
        if elsewhere:
            writing = _Writing(task, lambda name: host_memory.bytes_of(held[name])[1])
            writing.run_with(ranks, elsewhere)
            self._writing = (ranks, writing)
            self.settle(wait=True)
            return
        if self._in_background:
            own = {name: held[name] for name, _, _ in own_parts(task.plan, task.rank)}
            copies = self._snapshot.take(own)
            writing = _Writing(task, copies.__getitem__)
            writing.start()
            self._writing = (ranks, writing)
            return
        writing = _Writing(task, lambda name: host_memory.bytes_of(held[name])[1])
        writing.run()
        self._writing = (ranks, writing)
        self.settle(wait=True)


def _bytes_in(parts: Mapping[Name, Held]) -> BytesOf:
    return lambda name: host_memory.bytes_of(parts[name])[1]


def _merged_state(step: int, everyone: Sequence[Mapping[str, Json]]) -> str:
    """Returns the contents of the file of what is no tensor, from what each rank has.

    Raises:
        CheckpointError: Two ranks have something else, or save another step.
    """
    states = [training_state.from_text(facts["state"]) for facts in everyone]
    places = [facts["place"] for facts in everyone]
    steps = [facts["step"] for facts in everyone]
    if len(set(steps)) > 1:
        other = next(rank for rank, one in enumerate(steps) if one != step)
        raise CheckpointError(
            "the ranks save different steps",
            expected=f"step {steps[0]}, as on rank 0",
            got=f"step {steps[other]} on rank {other} of the job",
            fix="call save with the same step on every rank",
        )
    return training_state.to_text({"step": step, **training_state.merged(states, places)})
