"""Saves steps: all ranks agree on a plan, then each writes, at once or in a thread; see ``Saver``.

A save is unsettled while a rank may still be writing: only :meth:`Saver.settle`, which is
collective, says whether it succeeded.
"""

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
from fleetpipe.checkpoint.ranks import RankCoordinates, Ranks
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

#: The unsettled save into each folder of a run; several managers of this process may use a folder.
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
    """Returns which script this process runs: ``"name"`` of the file and digest of ``"arguments"``.

    The digest is of the command-line arguments when this function was first called; a script may
    change ``sys.argv`` later. The dict is empty if no script was started: in a notebook, under
    ``-c``, or in a worker of another program, such as Ray's.
    """
    return dict(_script_of(sys.modules["__main__"]))


@functools.cache
def _script_of(_main: ModuleType) -> dict[str, str]:
    """Returns the result of :func:`current_script`; computed once for each main module."""
    file, *arguments = sys.argv or [""]
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file() or Path(sys.prefix) in path.parents:
        return {}
    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()
    return {"name": path.name, "arguments": digest}


class _Prepared(NamedTuple):
    """The parts of a save that later saves use again, while ranks have the same tensors.

    Attributes:
        plan: Which rank writes which part into which file.
        indexes: The texts of index files, by name.
        manifest: The manifest without the fields of one step.
    """

    plan: FilePlan
    indexes: Mapping[str, str]
    manifest: Manifest


class _Unsettled(NamedTuple):
    """A save that has begun; not all ranks know yet whether it succeeded.

    Attributes:
        ranks: The ranks that save.
        writing: The writing of this rank's part.
        owner: The right to write into the folder, which no other job gets meanwhile; None if none
            is needed.
    """

    ranks: Ranks
    writing: writer.Writing
    owner: FolderOwner | None


def _finish_at_exit() -> None:
    """At the end of the process, waits for all saves; a lost step becomes an error exit code.

    It is registered with ``atexit``.
    """
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
    # The first lost step ends the process, unless another error does; the other ones are logged.
    first = lost.pop(0) if lost and watch.error_at_exit() is None else None
    for error_of_step in lost:
        _log.error("%s", error_of_step)
    if first is not None:
        attempt_files.tell_failure(Failure.of(attempt_files.own_rank(), first))
        try:
            end(first)
        finally:  # Python itself would end with status 0
            watch.end_with_error(first)


class Saver:
    """Saves steps of a run into its folder; at most one step is being written at a time.

    Attributes:
        owner: The right to write into the folder; None for a folder that no other job can have.
    """

    def __init__(self, retention: Retention, in_background: bool) -> None:
        """Creates a saver for a run's folder.

        Args:
            retention: The folder of the run, and which steps are kept there.
            in_background: Whether a thread writes, from copies of the tensors.
        """
        self._retention = retention
        #: The folder of the run, and its key in ``_unsettled``.
        self._run_directory, self._key = retention.run_directory, retention.run_directory.resolve()
        self._in_background = in_background
        #: The last plan, by the job and a digest of each rank's tensors.
        self._plans: dict[tuple[Job | str | None, ...], _Prepared] = {}
        self._snapshot = writer.Snapshot()
        # Called here, before the script may change its arguments.
        current_script()
        #: Whether the drafts of earlier attempts were removed.
        self._cleaned = False
        self.owner: FolderOwner | None = FolderOwner.for_folder(retention.run_directory)
        #: The job, and its ranks that do not see the folder of rank 0; None before the first save.
        self._ranks_without_folder: tuple[Job | None, list[int]] | None = None

    @dynamic_mode()
    def save(
        self,
        ranks: Ranks,
        step: int,
        objects: Objects,
        metrics: Mapping[str, float],
        extra: Mapping[str, Any],
    ) -> Saving:
        """Saves a step; no other save may be unsettled. Collective over ``ranks``.

        Args:
            ranks: The ranks of the job.
            step: The number of the step.
            objects: The objects to save.
            metrics: Numbers by name, which the manifest stores.
            extra: Values of JSON by name, which ``state.json`` stores.

        Returns:
            The handle of the save.

        Raises:
            CheckpointError: A rank cannot save; every rank raises.
        """
        if ranks.job is not None:
            ranks.job.require_others()
        model = objects.required_model()
        optimizer = objects.optimizer_part(model)
        of_optimizer = {} if optimizer is None else optimizer.local_tensors()
        kind = None if optimizer is None else optimizer.kind
        activity = f"saving step {step}"
        script = objects.script_part(ranks.coordinates)
        of_rank = {**model.local_tensors(), **of_optimizer, **script.local_tensors()}
        local = _with_replica_statistics(ranks, activity, of_rank)

        def facts() -> dict[str, Json]:
            """Checks this rank's model, and returns the result of ``_facts_for_ranks``."""
            model.require_no_added_parameters()
            state = objects.training_state(model).collect()
            if objects.state is not None:
                state[STATE] = script.trees()
            state["extra"] = training_state.as_json(extra, "extra")
            return self._facts_for_ranks(
                ranks, step, f"{kind} {Inventory.describe(local).to_json()}", state
            )

        everyone = ranks.together(activity, facts)
        draft = self._run_directory / everyone[0]["draft"]
        try:
            prepared = self._prepare(ranks, activity, everyone, local, model, kind)
            plan = prepared.plan
            texts = {**prepared.indexes, training_state.FILE: _merge_states_text(step, everyone)}
            manifest = replace(
                prepared.manifest,
                step=step,
                files=writer.described_files(plan, texts),
                metrics=training_state.as_json(metrics, "metrics"),
                script=everyone[0]["script"],
                allowed=() if ranks.job is None else tuple(ranks.job.allow.used),
            )
        except CheckpointError:
            if ranks.rank == 0:
                run_folder.remove_left(draft)
            raise
        rank, count = ranks.rank, ranks.count
        task = writer.Assignment(self._retention, draft, plan, rank, count, manifest, texts)
        self._begin(ranks, task, local)
        return Saving(self, step)

    @dynamic_mode()
    def settle(self, wait: bool) -> None:
        """Lets all ranks agree whether the last save succeeded, if they have not yet. Collective.

        Args:
            wait: Whether to wait until all ranks have written; without it, a save that a rank is
                still writing stays unsettled.

        Raises:
            CheckpointError: A rank could not write; every rank raises.
        """
        if self._key not in _unsettled:
            return
        ranks, writing, _ = _unsettled[self._key]
        activity = f"saving step {writing.task.manifest.step}"
        if not wait and any(ranks.together(activity, lambda: writing.running)):
            return
        try:
            ranks.together(activity, writing.end)
        except CheckpointError:
            del _unsettled[self._key]
            if ranks.rank == 0:
                run_folder.remove_left(writing.task.draft)
            raise
        del _unsettled[self._key]

    def claim(self, ranks: Ranks) -> None:
        """Makes rank 0 of this job the writer of the folder. Collective over ``ranks``.

        Raises:
            CheckpointError: Another job is the writer; every rank raises.
        """
        activity = "taking the folder of checkpoints"
        ranks.together(activity, lambda: self._acquire() if ranks.rank == 0 else None)

    def _acquire(self) -> None:
        """Makes this process the writer of the folder; raises an error if another one is."""
        if self.owner is not None:
            self.owner.acquire()

    def release(self) -> None:
        """Lets another job write into the folder, unless a save is unsettled."""
        if self._key not in _unsettled and self.owner is not None:
            self.owner.release()

    def begin_anew(self) -> int:
        """Waits until this rank has written an unsettled save, then forgets the save and all plans.

        Called in a job of which a rank was replaced by a new process. Not collective.

        Returns:
            The step of the save; 0 if none was unsettled.
        """
        self.finish()
        lost = _unsettled.pop(self._key, None)
        step = 0 if lost is None else lost.writing.task.manifest.step
        self._ranks_without_folder = None
        self._plans.clear()
        self._cleaned = False  # the next save removes the draft
        return step

    def finish(self) -> None:
        """Waits until this rank has written its part of an unsettled save; logs its error."""
        if self._key in _unsettled:
            writing = _unsettled[self._key].writing
            try:
                writing.end()
            except Exception as error:
                step = writing.task.manifest.step
                _log.warning("step %d was not saved by this rank: %s", step, error)

    def _facts_for_ranks(
        self, ranks: Ranks, step: int, described: str, state: Mapping[str, Json]
    ) -> dict[str, Json]:
        """Returns what this rank tells the others about a save; rank 0 makes the draft's folder.

        Args:
            ranks: The ranks of the job.
            step: The number of the step.
            described: A text that describes the tensors of this rank; if it changes, the plan is
                made anew.
            state: The state of this rank beside its tensors.

        Returns:
            The ``step``; the ``digest`` of ``described``; the ``state`` as text; as ``place`` the
            coordinates of this rank; on rank 0 the name of the ``draft``, elsewhere ""; as
            ``script`` the result of :func:`current_script`.
        """
        return {
            "step": step,
            "digest": hashlib.sha256(described.encode()).hexdigest(),
            "state": training_state.to_text(state),
            "place": ranks.coordinates.to_json(),
            "draft": self._make_draft(step) if ranks.rank == 0 else "",
            "script": current_script(),
        }

    def _make_draft(self, step: int) -> str:
        """Makes a new folder for the draft of a step, which all ranks write; returns its name."""
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
        activity: str,
        everyone: Sequence[Mapping[str, Json]],
        local: Mapping[TensorName, LocalTensor],
        model: NamedTensors,
        optimizer: str | None,
    ) -> _Prepared:
        """Returns the plan of a save: the last save's, unless the tensors of a rank have changed.

        Collective over ``ranks`` if the plan is made again.

        Args:
            ranks: The ranks of the job.
            activity: A phrase for messages, such as ``saving step 3``.
            everyone: The result of :meth:`_facts_for_ranks` on each rank.
            local: The tensors of this rank.
            model: The model.
            optimizer: The type of the optimizer; None without one.
        """
        # The digest of a rank changes with the names, shapes and dtypes of its tensors.
        key = (ranks.job, *(facts["digest"] for facts in everyone))
        if key not in self._plans:
            texts = ranks.together(activity, lambda: Inventory.describe(local).to_json())
            plan = plan_files([Inventory.from_json(text) for text in texts])
            versions = {"fleetpipe": __version__, "paddle": VERSION}
            # What differs between steps, the caller fills in.
            manifest = Manifest(
                *(0, {}, {}, model.order(), optimizer, {}, ranks.layout, versions),
                plain_order(model.order(), model.plain_names),
                adapters=model.checkpoint_part().adapters,
            )
            self._plans = {key: _Prepared(plan, indexes(plan), manifest)}
        return self._plans[key]

    def _begin(
        self, ranks: Ranks, task: writer.Assignment, local: Mapping[TensorName, LocalTensor]
    ) -> None:
        """Writes this rank's part, in a thread from copies or at once. Collective.

        Args:
            ranks: The ranks of the job.
            task: What this rank has to write.
            local: The tensors of this rank.
        """
        if self._ranks_without_folder is None or self._ranks_without_folder[0] is not ranks.job:
            activity = f"saving step {task.manifest.step}"
            sees = ranks.together(activity, task.draft.is_dir)
            without_folder = [rank for rank, sees_folder in enumerate(sees) if not sees_folder]
            self._ranks_without_folder = (ranks.job, without_folder)
        _, without_folder = self._ranks_without_folder
        # A thread cannot write for ranks without the folder, which send their parts to rank 0.
        if self._in_background and not without_folder:
            parts = {name: local[name] for name, _, _ in task.plan.parts_of(task.rank)}
            writing = writer.Writing(task, self._snapshot.take(parts).__getitem__)
            atexit.unregister(_finish_at_exit)
            atexit.register(_finish_at_exit)  # before the end of a job that has begun since
            watch.note_exits()
            _unsettled[self._key] = _Unsettled(ranks, writing, self.owner)
            writing.start()
            return
        writing = writer.Writing(task, writer.bytes_in(local))
        writing.run_with(ranks, without_folder)
        _unsettled[self._key] = _Unsettled(ranks, writing, self.owner)
        self.settle(wait=True)


def _merge_states_text(step: int, everyone: Sequence[Mapping[str, Json]]) -> str:
    """Returns the text of ``state.json``, merged from the states of all ranks.

    Args:
        step: The step that this rank saves.
        everyone: The result of :meth:`Saver._facts_for_ranks` on each rank.

    Raises:
        CheckpointError: The ranks save different steps, or have different states.
    """
    states = [json.loads(facts["state"]) for facts in everyone]
    all_coordinates = [RankCoordinates.from_json(facts["place"]) for facts in everyone]
    steps = [facts["step"] for facts in everyone]
    if len(set(steps)) > 1:
        other = next(rank for rank, saved_step in enumerate(steps) if saved_step != step)
        raise CheckpointError(
            "the ranks save different steps",
            expected=f"step {steps[0]}, as on rank 0",
            got=f"step {steps[other]} on rank {other} of the job",
            fix="call save with the same step on every rank",
        )
    return training_state.to_text(
        {"step": step, **training_state.merge_states(states, all_coordinates)}
    )


def _with_replica_statistics(
    ranks: Ranks, activity: str, local: Mapping[TensorName, LocalTensor]
) -> Mapping[TensorName, LocalTensor]:
    """Returns this rank's tensors, and its running statistics unlike those of the first replica.

    Each replica has the running statistics of its own part of the data. Those of the first replica
    are saved as the model's. If those of another replica differ, they are saved too, in a group of
    their own: ``1/model/3._mean`` is that of replica 1. Collective if there are replicas.

    Args:
        ranks: The ranks of the job.
        activity: A phrase for messages, such as ``saving step 3``.
        local: The tensors of this rank.

    Raises:
        CheckpointError: A rank cannot read its memory; every rank raises.
    """
    shard, (replica, replicas) = ranks.coordinates.shard.number, ranks.coordinates.replica
    if replicas == 1:
        return local
    statistics = {name: tensor for name, tensor in local.items() if tensor.differs}

    def checksums_here() -> list[Any]:
        """Returns this rank's shard and replica, and the checksum of each of its statistics."""
        contents = {name: [writer.bytes_of_tensor(one)] for name, one in statistics.items()}
        rows = [[*name, tensors.checksum(content)] for name, content in contents.items()]
        return [shard, replica, rows]

    everyone = ranks.together(activity, checksums_here)
    checksums = {
        (of_replica, of_shard, TensorName(group, name)): checksum
        for of_shard, of_replica, rows in everyone
        for group, name, checksum in rows
    }
    # The statistics that differ from those of the first replica, for the same shard.
    differing = {
        (of_replica, name)
        for (of_replica, of_shard, name), checksum in checksums.items()
        if checksum != checksums.get((0, of_shard, name), checksum)
    }
    # The checksums of each statistic on all ranks.
    distinct: dict[TensorName, set[int]] = {}
    for (*_, name), checksum in checksums.items():
        distinct.setdefault(name, set()).add(checksum)
    # Ranks share the writing of tensors that are equal on all, as frozen parameters are.
    shared = {n: tensor._replace(differs=len(distinct[n]) > 1) for n, tensor in statistics.items()}
    of_this_replica = {
        name.of_replica(replica): tensor
        for name, tensor in statistics.items()
        if (replica, name) in differing
    }
    return {**local, **shared, **of_this_replica}
