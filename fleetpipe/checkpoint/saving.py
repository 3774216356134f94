"""Saves steps: all ranks agree on a plan, then write, at once or in a thread; see ``Saver``."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fleetpipe import log
from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.model_and_optimizer import NamedTensors
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import STATE, TensorName, plain_order
from fleetpipe.checkpoint.files import run_folder, tensors, writer
from fleetpipe.checkpoint.files.manifest import Manifest
from fleetpipe.checkpoint.files.run_folder import FolderOwner, Retention
from fleetpipe.checkpoint.files.tensors import FilePlan, Inventory, indexes, plan_files
from fleetpipe.checkpoint.files.writer import (
    Assignment,
    Snapshot,
    Writing,
    bytes_in,
    described_files,
)
from fleetpipe.checkpoint.ranks import Place, Ranks
from fleetpipe.errors import CheckpointError
from fleetpipe.job import attempt_files, watch
from fleetpipe.job.attempt_files import Failure
from fleetpipe.job.job import Job, end
from fleetpipe.mesh.parts import LocalTensor
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.version import __version__

_log = log.logger(__name__)

#: A value of JSON.
Json = Any

#: By folder, since several managers of this process may save there, one after the other.
_unsettled: dict[Path, _Unsettled] = {}


class Saving:
    """The handle of a save.

    Attributes:
        step: The step that is saved.
    """

    def __init__(self, saver: Saver, step: int) -> None:
        self._saver = saver
        self.step = step

    def wait(self) -> None:
        """Waits until the step is on the disk. Collective, unless an earlier wait has returned.

        Raises:
            CheckpointError: A rank could not write it; every rank raises.
        """
        self._saver.settle(wait=True)


def current_script() -> dict[str, str]:
    """Returns the name of the running script, and a digest of its arguments at the first call.

    The dict is empty if no script was started: in a notebook, under ``-c``, in a worker of another
    program, as Ray's.
    """
    return dict(_script_of(sys.modules["__main__"]))


@functools.cache
def _script_of(_main: ModuleType) -> dict[str, str]:
    """Returns the name of the user's script and a digest of its arguments; empty without one."""
    file, *arguments = sys.argv or [""]
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file() or Path(sys.prefix) in path.parents:
        return {}
    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
    return {"name": path.name, "arguments": digest}


class _Prepared(NamedTuple):
    """The parts of a save that are the same for all steps, as long as ranks hold the same tensors.

    Attributes:
        plan: Which rank writes what into which file.
        indexes: The texts of index files, by name.
        manifest: The manifest without the fields of one step.
    """

    plan: FilePlan
    indexes: Mapping[str, str]
    manifest: Manifest


class _Unsettled(NamedTuple):
    """A save that is written in the background, until all ranks know whether it succeeded."""

    ranks: Ranks
    writing: Writing
    #: Stored here so that no other job may write into the folder meanwhile.
    owner: FolderOwner | None


def _end_with_process() -> None:
    """Waits for all saves when the process ends, and ends it with an error if a step is lost."""
    lost = []
    for run_directory, (_, writing, _) in _unsettled.items():
        try:
            writing.end()
        except BaseException as error:  # Ctrl-C loses the step too
            step, reason = writing.task.manifest.step, str(error) or type(error).__name__
            lost.append(
                CheckpointError(
                    f"step {step} was not saved: {reason}",
                    where=str(run_directory),
                    fix="make what it names possible, and start again: the run goes on from the "
                    "step that was saved before",
                )
            )
    first = lost.pop(0) if lost and watch.error_at_exit() is None else None
    for one in lost:
        _log.error("%s", one)
    if first is not None:
        attempt_files.tell_failure(Failure.of(attempt_files.own_rank(), first))
        try:
            end(first)
        finally:  # Python itself would end with status 0
            watch.end_with_error(first)


class Saver:
    """Saves steps of a run, of which at most one is being written."""

    def __init__(self, retention: Retention, in_background: bool) -> None:
        """Creates a saver for a run's folder.

        Args:
            retention: The folder of the run, and which steps are kept there.
            in_background: Whether a thread writes copies.
        """
        self._retention = retention
        self._run_directory, self._key = retention.run_directory, retention.run_directory.resolve()
        self._in_background = in_background
        self._plans: dict[tuple[Job | str | None, ...], _Prepared] = {}
        self._snapshot = Snapshot()
        current_script()
        #: Whether left drafts were removed.
        self._cleaned = False
        #: None for a folder that no other job can have.
        self.owner: FolderOwner | None = FolderOwner.of(retention.run_directory)
        #: A job, and its ranks that do not see rank 0's folder; None before the first save.
        self._seen: tuple[Job | None, list[int]] | None = None

    @dynamic_mode()
    def save(
        self,
        ranks: Ranks,
        step: int,
        objects: Objects,
        metrics: Mapping[str, float],
        extra: Mapping[str, Any],
    ) -> Saving:
        """Saves a step; no other save may be running. Collective over ``ranks``.

        Raises:
            CheckpointError: A rank cannot save; every rank raises.
        """
        if ranks.job is not None:
            ranks.job.require_others()
        model = objects.required_model()
        optimizer = objects.optimizer_part(model)
        of_optimizer = {} if optimizer is None else optimizer.local_tensors()
        kind = None if optimizer is None else optimizer.kind
        what = f"saving step {step}"
        script = objects.script_part(ranks.place)
        of_run = {**model.local_tensors(), **of_optimizer, **script.local_tensors()}
        local = _with_statistics(ranks, what, of_run)

        def facts() -> dict[str, Json]:
            model.require_no_added_parameters()
            state = objects.training_state(model).collect()
            if objects.state is not None:
                state[STATE] = script.trees()
            state["extra"] = training_state.plain(extra, "extra")
            return self._facts(ranks, step, f"{kind} {Inventory.of(local).to_json()}", state)

        everyone = ranks.together(what, facts)
        draft = self._run_directory / everyone[0]["draft"]
        try:
            prepared = self._prepare(ranks, what, everyone, local, model, kind)
            plan = prepared.plan
            texts = {**prepared.indexes, training_state.FILE: _merged_state(step, everyone)}
            manifest = replace(
                prepared.manifest,
                step=step,
                files=described_files(plan, texts),
                metrics=training_state.plain(metrics, "metrics"),
                script=everyone[0]["script"],
                allowed=() if ranks.job is None else tuple(ranks.job.allow.used),
            )
        except CheckpointError:
            if ranks.rank == 0:
                run_folder.remove_left(draft)
            raise
        task = Assignment(self._retention, draft, plan, ranks.rank, ranks.count, manifest, texts)
        self._begin(ranks, task, local)
        return Saving(self, step)

    @dynamic_mode()
    def settle(self, wait: bool) -> None:
        """Ends the save that is being written, if there is one. Collective over its ranks.

        Args:
            wait: Whether to wait for it; else it returns at once while a rank is writing.

        Raises:
            CheckpointError: A rank could not write; every rank raises.
        """
        if self._key not in _unsettled:
            return
        ranks, writing, _ = _unsettled[self._key]
        what = f"saving step {writing.task.manifest.step}"
        if not wait and any(ranks.together(what, lambda: writing.running)):
            return
        try:
            ranks.together(what, writing.end)
        except CheckpointError:
            del _unsettled[self._key]
            if ranks.rank == 0:
                run_folder.remove_left(writing.task.draft)
            raise
        del _unsettled[self._key]

    def claim(self, ranks: Ranks) -> None:
        """Makes rank 0 the writer of the folder. Collective over ``ranks``.

        Raises:
            CheckpointError: Another job is the writer; every rank raises.
        """
        what = "taking the folder of checkpoints"
        ranks.together(what, lambda: self._acquire() if ranks.rank == 0 else None)

    def _acquire(self) -> None:
        if self.owner is not None:
            self.owner.acquire()

    def release(self) -> None:
        """Lets another job write into the folder, unless this one is writing."""
        if self._key not in _unsettled and self.owner is not None:
            self.owner.release()

    def begin_anew(self) -> int:
        """Waits for this rank's part of a save under way, then drops it and all agreements.

        Returns:
            The step of that save; 0 for none.
        """
        self.finish()
        lost = _unsettled.pop(self._key, None)
        step = 0 if lost is None else lost.writing.task.manifest.step
        self._seen = None
        self._plans.clear()
        self._cleaned = False  # the next save removes the draft
        return step

    def finish(self) -> None:
        """Waits until this rank has written its part; logs an error."""
        if self._key in _unsettled:
            writing = _unsettled[self._key].writing
            try:
                writing.end()
            except Exception as error:
                step = writing.task.manifest.step
                _log.warning("step %d was not saved by this rank: %s", step, error)

    def _facts(
        self, ranks: Ranks, step: int, described: str, state: Mapping[str, Json]
    ) -> dict[str, Json]:
        """Returns what the ranks exchange about a save; rank 0 also makes the draft's folder."""
        return {
            "step": step,
            "digest": hashlib.sha256(described.encode()).hexdigest(),
            "state": training_state.to_text(state),
            "place": ranks.place.to_json(),
            "draft": self._make_draft(step) if ranks.rank == 0 else "",
            "script": current_script(),
        }

    def _make_draft(self, step: int) -> str:
        """Makes a new folder into which all ranks write, and returns its name."""
        self._run_directory.mkdir(parents=True, exist_ok=True)
        self._acquire()
        if not self._cleaned:
            run_folder.remove_drafts(self._run_directory)
            self._cleaned = True
        draft = run_folder.draft_of(self._run_directory, step, uuid.uuid4().hex[:8])
        draft.mkdir()
        return draft.name

    def _prepare(
        self,
        ranks: Ranks,
        what: str,
        everyone: Sequence[Mapping[str, Json]],
        local: Mapping[TensorName, LocalTensor],
        model: NamedTensors,
        optimizer: str | None,
    ) -> _Prepared:
        """Returns the plan of a save; it is computed again when a rank holds other tensors."""
        key = (ranks.job, *(facts["digest"] for facts in everyone))
        if key not in self._plans:
            texts = ranks.together(what, lambda: Inventory.of(local).to_json())
            plan = plan_files([Inventory.from_json(text) for text in texts])
            versions = {"fleetpipe": __version__, "paddle": VERSION}
            manifest = Manifest(
                *(0, {}, {}, model.order(), optimizer, {}, ranks.layout, versions),
                plain_order(model.order(), model.plain_names),
                adapters=model.checkpoint_part().adapters,
            )
            self._plans = {key: _Prepared(plan, indexes(plan), manifest)}
        return self._plans[key]

    def _begin(
        self, ranks: Ranks, task: Assignment, local: Mapping[TensorName, LocalTensor]
    ) -> None:
        """Writes this rank's part: in a thread, from a copy, or at once. Collective."""
        if self._seen is None or self._seen[0] is not ranks.job:
            what = f"saving step {task.manifest.step}"
            sees = ranks.together(what, task.draft.is_dir)
            self._seen = (ranks.job, [rank for rank, here in enumerate(sees) if not here])
        elsewhere = self._seen[1]
        if self._in_background and not elsewhere:
            parts = {name: local[name] for name, _, _ in task.plan.parts_of(task.rank)}
            writing = Writing(task, self._snapshot.take(parts).__getitem__)
            atexit.unregister(_end_with_process)
            atexit.register(_end_with_process)  # before the end of a job that has begun since
            watch.note_exits()
            _unsettled[self._key] = _Unsettled(ranks, writing, self.owner)
            writing.start()
            return
        writing = Writing(task, bytes_in(local))
        writing.run_with(ranks, elsewhere)
        _unsettled[self._key] = _Unsettled(ranks, writing, self.owner)
        self.settle(wait=True)


def _merged_state(step: int, everyone: Sequence[Mapping[str, Json]]) -> str:
    """Returns the text of ``state.json``, merged from the states of all ranks."""
    states = [json.loads(facts["state"]) for facts in everyone]
    places = [Place.from_json(facts["place"]) for facts in everyone]
    steps = [facts["step"] for facts in everyone]
    if len(set(steps)) > 1:
        other = next(rank for rank, one in enumerate(steps) if one != step)
        raise CheckpointError(
            "the ranks save different steps",
            expected=f"step {steps[0]}, as on rank 0",
            got=f"step {steps[other]} on rank {other} of the job",
            fix="call save with the same step on every rank",
        )
    return training_state.to_text({"step": step, **training_state.merge_states(states, places)})


def _with_statistics(
    ranks: Ranks, what: str, local: Mapping[TensorName, LocalTensor]
) -> Mapping[TensorName, LocalTensor]:
    """Returns this rank's tensors, and its replica's running statistics if they differ.

    Each replica has the running statistics of its own part of the data. Those of the first replica
    belong to the model; those of another have a group of their own, as ``1/model/3._mean``.
    Collective if there are replicas.

    Raises:
        CheckpointError: A rank cannot read its memory; every rank raises.
    """
    member, (replica, replicas) = ranks.place.shard.number, ranks.place.replica
    if replicas == 1:
        return local
    mine = {name: one for name, one in local.items() if one.differs}

    def sums() -> list[Any]:
        contents = {name: [writer.bytes_of_tensor(one)] for name, one in mine.items()}
        sums = [[*name, tensors.checksum(content)] for name, content in contents.items()]
        return [member, replica, sums]

    everyone = ranks.together(what, sums)
    gathered = {
        (names, of, TensorName(group, name)): checksum
        for of, names, rows in everyone
        for group, name, checksum in rows
    }
    elsewhere = {
        (names, name)
        for (names, of, name), checksum in gathered.items()
        if checksum != gathered.get((0, of, name), checksum)
    }
    several: dict[TensorName, set[int]] = {}
    for (*_, name), checksum in gathered.items():
        several.setdefault(name, set()).add(checksum)
    # Ranks share the writing of tensors that are equal on all, as frozen parameters are.
    shared = {name: one._replace(differs=len(several[name]) > 1) for name, one in mine.items()}
    of_replica = {
        name.of_replica(replica): mine[name] for name in mine if (replica, name) in elsewhere
    }
    return {**local, **shared, **of_replica}
