"""``fleetpipe locate``: runs a job and its twin, and prints the first place that differs.

The twin is the same script on one device. It runs twice: the second, perturbed run, with each
number changed by at most one unit in the last place, shows how large rounding becomes. ``run`` is
the command, ``first_difference`` compares two records step by step, and ``_Comparison``
compares the phases of one step in their order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fleetpipe.compare.differences import gap
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import CUT, Location, record
from fleetpipe.contrib.locator.flow import LayerChecks, StepBesideTwin, Tolerances
from fleetpipe.contrib.locator.layouts import FullTensors, SampleMatch, is_sample, match_samples
from fleetpipe.contrib.locator.locate_options import SETTING, TIMEOUT, Setting
from fleetpipe.contrib.locator.parameters import ParameterChecks
from fleetpipe.contrib.locator.record import DROPPED, RankTensors, Record, TensorKey
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.launch import script, streams
from fleetpipe.launch.script import command_folder
from fleetpipe.mesh.axes import STREAMS

#: By micro-batch, the loss from which backward begins: its share of the batch's loss.
Losses = dict[int, float]

#: The folders in a record: of the job, its twin, and the twin changed in the last place.
JOB, TWIN, PERTURBED = "job", "twin", "perturbed"


def first_difference(job: Record, twin: Record, perturbed: Record | None = None) -> Location | None:
    """Returns the first place where a job differs from its twin by more than rounding.

    Args:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        perturbed: The tensors of the twin with its numbers changed in the last place; None: any
            different bit counts.
    """
    tolerances = Tolerances(twin, perturbed)
    for number in range(min(job.steps, twin.steps)):
        step = StepBesideTwin(job, twin, tolerances, number)
        finding = _Comparison(step, match_samples(job, twin, number)).find_first()
        if finding is not None:
            return finding
    return None


class _Comparison:
    """Compares one step of a job with the one-device twin's, one phase of the step after another.

    Each ``_check_`` method returns the first difference of its phase, or None.
    """

    def __init__(self, step: StepBesideTwin, samples: SampleMatch) -> None:
        """Prepares the comparison.

        Args:
            step: The records of the step.
            samples: The one-device twin's rows that each micro-batch of the job has.
        """
        self._step, self._samples = step, samples
        self._flow, self._parameters = LayerChecks(step, samples), ParameterChecks(step)

    def find_first(self) -> Location | None:
        """Finds the first difference in this step, in the order of computation."""
        parameters = self._parameters
        checks: list[Callable[[], Location | None]] = [
            parameters.check_initial,
            self._check_mode,
            self._check_samples,
            lambda: self._flow.find_first("forward"),
            self._check_random_streams,
            self._check_losses,
            self._check_returned_losses,
            parameters.check_cleared,
            self._check_backward,
            parameters.check_reduction,
            parameters.check_trained,
            parameters.check_clip,
            parameters.check_learning_rate,
            parameters.check_update,
            parameters.check_buffers,
        ]
        return next(filter(None, (check() for check in checks)), None)

    # Data and loss

    def _check_mode(self) -> Location | None:
        """Finds ranks that recorded a loss but no inputs, as their model is in evaluation mode."""
        step = self._step
        training, wrong = [], []
        for rank in step.job.ranks:
            data, losses = (rank.in_phase(step.number, phase) for phase in ("data", "loss"))
            if any(key.role.startswith("input") for key in data):
                training.append(rank.rank)
            elif {key.role for key in losses} == {"share"}:  # in a user's own loop
                wrong.append(rank.rank)
        if not training or not wrong:
            return None
        among = [*wrong, *training]
        return step.location("", "forward", wrong, locator.EVALUATING, among=among)

    def _check_samples(self) -> Location | None:
        """Finds a replica with other samples than the twin, or a rank with other labels."""
        step = self._step
        if self._samples.wrong is not None:
            cause, replica = self._samples.wrong
            if cause is locator.OTHER_SAMPLES and step.reads_on:
                raise UsageError(
                    f"the samples of replica {replica} cannot be compared with those of one device",
                    where=f"step {step.number}, a loop without train_batch",
                    cause="the script cuts them by a number of replicas that it does not ask Fleet "
                    "for, so that on one device it reads those of one replica; or the sampler is "
                    "wrong",
                    fix="say how it runs on one device, with --twin NAME=VALUE or --twin-arguments",
                )
            ranks = [n for n, rank in step.ranks.items() if step.job.replica(rank) == replica]
            words = cause.format(replica)
            return step.location("", "data", ranks, words, micro_batch=0, among=step.ranks)
        labels = [
            outcome
            for outcome in self._flow.outcomes("data")
            if not outcome.is_right
            and outcome.key.role.startswith("label")
            and is_sample(outcome.rank.tensors[outcome.key], outcome.key, step.twin)
        ]
        if not labels:
            return None
        first = min(outcome.key.micro_batch for outcome in labels)
        ranks = [o.rank.rank for o in labels if o.key.micro_batch == first]
        axis, split = step.axis_of(ranks, step.ranks), step.first_split_axis("sep", "cp")
        cause = locator.LABELS if axis or not split else locator.LABELS_OF_PARTS
        return step.location("", "data", ranks, cause, axis or split, first)

    def _check_random_streams(self) -> Location | None:
        """Finds two ranks whose dropouts drew the same mask for different values."""
        step = self._step
        # By the key of a mask, the ranks that drew one, and its bytes. A small mask, or one that
        # drops nothing, may be the same by chance.
        seen: dict[TensorKey, list[tuple[RankTensors, bytes]]] = defaultdict(list)
        for rank in step.job.ranks:
            for key, mask in rank.in_phase(step.number, "forward").items():
                if key.role == "mask" and mask.size > 32 and not mask.all():
                    seen[key].append((rank, mask.tobytes()))
        for key, masks in seen.items():
            for (first, first_mask), (second, second_mask) in itertools.combinations(masks, 2):
                axis = step.axis_of([first.rank], [first.rank, second.rank])
                if axis in ("", "pp", "ep") or first_mask != second_mask:
                    continue
                x, y = (rank.tensors.get(key._replace(role=DROPPED)) for rank in (first, second))
                equal = x is None or y is None or gap(x, y) <= 1e-3
                # Ranks that share a sample drop the same values alike, and shards differently.
                if axis in ("mp", "sep", "cp") and equal:
                    continue
                ranks, cause = [first.rank, second.rank], STREAMS.format(axis)
                measured = key.micro_batch, 1.0
                return step.location(key.name, "forward", ranks, cause, axis, *measured)
        return None

    def _check_losses(self) -> Location | None:
        """Compares the losses from which backward begins.

        Their sum may be larger than the twin's by one of the factors ``scales`` of the step.
        """
        step, flow = self._step, self._flow
        shares, expected = self._losses_by_coordinate(), _losses_of_rank(step.twin, step.number)
        if not shares or not expected:
            return None
        tolerance = step.tolerance(step.key("loss", "", "share", 0), np.zeros(1, "float32"))
        ratio = _sum_losses(shares.values()) / (_sum_losses([expected]) or 1.0)
        off = self._distance_to_scale(ratio)  # 0 to rounding, if all is right
        if off <= tolerance or self._adds_up_along_mp(ratio, _sum_losses([expected]), tolerance):
            return None
        if flow.waiting is not None:
            # The last tensors before the loss only add up to the twin's: no rank has summed them.
            return flow.describe(flow.waiting)
        count = len(next(iter(shares.values())))
        cause = locator.cause_of_wrong_loss(
            ratio, tolerance, step.scales, count, flow.rows, step.degrees
        )
        ranks = [rank.rank for rank in step.job.ranks if _losses_of_rank(rank, step.number)]
        wrong: list[tuple[int, int]] = []  # micro-batches and ranks
        for rank in step.job.ranks:
            for number, share in _losses_of_rank(rank, step.number).items():
                # The twin has losses of its own micro-batches only, not of other rows.
                of_twin = flow.twin_rows_of(rank, number).micro_batch
                if of_twin is None or of_twin not in expected:
                    continue
                if self._distance_to_scale(share / (expected[of_twin] or 1.0)) > tolerance:
                    wrong.append((number, rank.rank))
        bad = [rank for _, rank in wrong] or ranks
        axis = step.axis_of(bad, ranks) or step.first_split_axis(
            "dp", "sharding", "sep", "cp", "mp"
        )
        first = min(wrong)[0] if wrong else None
        return step.location("", "loss", bad, cause, axis, first, off, tolerance)

    def _distance_to_scale(self, ratio: float) -> float:
        """Returns the relative distance of a ratio of losses to the nearest of ``scales``.

        A loss may be larger than the one-device twin's by each of these factors without a fault.
        """
        return min(abs(ratio / scale - 1) for scale in self._step.scales)

    def _losses_by_coordinate(self, *more: str) -> dict[tuple[int, ...], Losses]:
        """Returns the losses of one rank for each group of coordinates on axes that split data.

        Args:
            more: Further axes whose coordinates are distinguished.

        Returns:
            The losses by the rank's coordinates on dp, sharding, sep, cp, ep and ``more``.
        """
        losses: dict[tuple[int, ...], Losses] = {}
        for rank in self._step.job.ranks:
            axes = ("dp", "sharding", "sep", "cp", "ep", *more)
            coordinate = tuple(rank.coordinate.get(axis, 0) for axis in axes)
            if coordinate not in losses and (of_rank := _losses_of_rank(rank, self._step.number)):
                losses[coordinate] = of_rank
        return losses

    def _adds_up_along_mp(self, ratio: float, expected: float, tolerance: float) -> bool:
        """Returns whether ranks along mp have losses of different tokens, which sum to the twin's.

        Args:
            ratio: The sum of the losses, of the ranks along mp only that of the first one, divided
                by the twin's loss.
            expected: The twin's loss.
            tolerance: The relative difference that rounding may cause.
        """
        members = self._step.degrees.get("mp", 1)
        # The same ratio if all ranks along mp count.
        total = _sum_losses(self._losses_by_coordinate("mp").values()) / (expected or 1.0)
        if abs(total - members * ratio) <= tolerance * abs(total):  # all have the same loss
            return False
        # Each rank's loss is a share of the loss of all tokens, or the mean over its own tokens.
        return min(self._distance_to_scale(total / n) for n in (1, members)) <= tolerance

    def _check_returned_losses(self) -> Location | None:
        """Compares the losses that ``train_batch`` returns."""
        step = self._step
        key = step.key("loss", "", "returned 0")
        value = step.twin.tensors.get(key)
        if value is None:
            return None
        apart, tolerance = step.gaps_of_ranks(key, value), step.tolerance(key, value)
        likely = "dp", "sharding", *step.degrees
        return step.beyond_rounding("", "loss", apart, tolerance, locator.RETURNED, *likely)

    # Backward

    def _check_backward(self) -> Location | None:
        """Finds the first wrong gradient of a layer's output, or of a parameter, in backward."""
        flow = self._flow
        outcomes = (o for o in flow.outcomes("gradient") if o.key.role.startswith("output"))
        # The first wrong gradient of an output, and of a parameter with its position in backward.
        wrong = flow.first_wrong(outcomes, backward=True)
        first = self._parameters.find_gradient()
        if wrong is None and first is not None:
            wrong = flow.waiting
        if first is None:
            return None if wrong is None else flow.describe(wrong)
        position, finding = first
        if wrong is not None and wrong[0].position < position:
            return flow.describe(wrong)
        if locator.NO_GRADIENT in finding.cause:
            layer = flow.first_layer_without_input_gradient()
            return finding._replace(layer=layer or finding.layer)
        if wrong is None and self._parameters.most_gradients_wrong:
            return finding._replace(layer="", cause=locator.ACCUMULATED)
        return finding


def _losses_of_rank(rank: RankTensors, step: int) -> Losses:
    """Returns the losses from which a rank's backward begins, by micro-batch."""
    losses = rank.in_phase(step, "loss").items()
    return {key.micro_batch: float(tensor.sum()) for key, tensor in losses if key.role == "share"}


def _sum_losses(losses_of_ranks: Collection[Losses]) -> float:
    """Returns the sum of the losses of all micro-batches of some ranks."""
    return sum(sum(losses.values()) for losses in losses_of_ranks)


def run(options: argparse.Namespace) -> int:
    """Runs a job and its twin and prints the result.

    The processes that it starts for them run this command again; there the variable ``SETTING`` is
    set, and the command runs and records the script.

    Returns:
        0 if nothing differs beyond rounding, 1 if something does, 2 if the command itself fails.

    Raises:
        UsageError: The job or its twin fails, trains nothing, or cannot be compared.
    """
    if SETTING in os.environ:
        if script.to_be_launched(options):
            return script.launch(options, "locate")
        from fleetpipe.contrib.locator import collecting

        return collecting.run(options)
    try:
        finding, steps = find_difference(options)
    except FleetPipeError:
        raise
    except Exception:
        traceback.print_exc()
        return 2
    if options.json:
        print(json.dumps(None if finding is None else finding.as_dict()))
    elif finding is None:
        print(f"locate: nothing differs beyond rounding (steps compared: {steps})")
    else:
        print(finding)
    return 0 if finding is None else 1


def find_difference(options: argparse.Namespace) -> tuple[Location | None, int]:
    """Runs a job and its twin, and compares them.

    Returns:
        The first place that differs, or None, and the number of compared steps.

    Raises:
        UsageError: The errors of :func:`run`.
    """
    with command_folder(large=True) as temporary:
        earlier = None if options.against is None else _read_earlier_twins(options.against)
        folders = [(options.record or temporary) / name for name in (JOB, TWIN, PERTURBED)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob(record.FILES):
                file.unlink()
        of_job, of_twin, of_perturbed = folders
        _run_recorded(options, Setting(str(of_job), options.steps))
        job = record.read(of_job)
        if earlier is not None:
            return first_difference(job, *earlier), min(job.steps, earlier[0].steps)
        automatic = not (options.twin or options.twin_arguments)
        setting = Setting(str(of_twin), job.steps, str(of_job), automatic=automatic)
        _run_recorded(options, setting)
        twin = record.read(of_twin)
        steps = min(job.steps, twin.steps)
        finding = first_difference(job, twin)
        if finding is not None or options.record is not None:
            perturbed = setting._replace(folder=str(of_perturbed), perturbed=True)
            _run_recorded(options, perturbed)
            finding = first_difference(job, twin, record.read(of_perturbed))
        finding = _find_wrong_cut(job, twin, finding)
        if finding is None and steps < job.steps:
            raise UsageError(
                f"the twin ends after {steps} of the job's {job.steps} steps; nothing differs in "
                "these",
                cause="it trains with the samples of all replicas, and the script reads a fixed "
                "number",
                fix="say how the script reads all of them on one device, with --twin or "
                f"--twin-arguments, or compare --steps {steps}",
            )
        return finding, steps


def _read_earlier_twins(folder: Path) -> tuple[record.Record, record.Record]:
    """Reads the one-device twin and the perturbed twin of an earlier record.

    Raises:
        UsageError: The folder has no such record.
    """
    for part in (TWIN, PERTURBED):
        if not any((folder / part).glob(record.FILES)):
            raise UsageError(
                "--against names a folder that has no record of a twin",
                where=str(folder / part),
                cause="it is another folder, or the run that was to make it has failed",
                fix="make one first: fleetpipe locate --record FOLDER train.py",
            )
    return record.read(folder / TWIN), record.read(folder / PERTURBED)


def _find_wrong_cut(
    job: record.Record, twin: record.Record, finding: Location | None
) -> Location | None:
    """If nothing else differs, finds a weight whose shards are cut in an unexpected way.

    Args:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        finding: The first difference that was found; None if there is none.

    Returns:
        ``finding`` if there is one; else the difference of the weight; None without such a weight.

    Raises:
        UsageError: The finding is in a layer whose weight the ranks have drawn by themselves.
    """
    initial = twin.ranks[0].by_name(0, "initial")
    for name, moved in FullTensors(job).unclear_layouts(initial).items():
        layer = name.rpartition(".")[0]
        if finding is None and moved:
            ranks, cause = [rank.rank for rank in job.ranks], f"{name}: {CUT}"
            axis = "mp" if "mp" in job.degrees else next(iter(job.degrees), "")
            return Location(layer, "initial", axis, ranks, 0, None, float("inf"), 0.0, cause)
        if finding and (finding.phase, finding.layer) == ("forward", layer.rpartition(".")[0]):
            raise UsageError(
                "this layer is not compared: nothing shows of which whole weight ranks have parts",
                where=finding.layer,
                cause=f"each rank draws its part of {name} by itself, or cuts it in a rare way",
                fix="draw the whole weight on all ranks, and give each its part of it",
            )
    return finding


def locate(
    path: str | Path,
    arguments: Sequence[str] = (),
    nproc: int = 1,
    twin: Sequence[str] = (),
    twin_arguments: str | None = None,
    steps: int = 4,
    record: str | Path | None = None,
    against: str | Path | None = None,
    log_dir: str | Path = "log",
    timeout: float = TIMEOUT,
) -> Location | None:
    """Runs a training script and its twin on one device, and names the first difference.

    Args:
        path: The script.
        arguments: The script's arguments.
        nproc: The number of processes.
        twin: Variables ``"NAME=VALUE"`` of the environment that make the script use degrees 1.
            Without these and ``twin_arguments``, ``fleet.init`` sets degrees to 1.
        twin_arguments: Additional arguments, after the others, that make the script use degrees 1.
        steps: The number of steps to compare; the script is ended after them.
        record: A folder that stores the tensors of job and twin.
        against: A folder from ``record`` of an earlier call; the job is compared with the twin in
            it.
        log_dir: The folder for the logs of several processes.
        timeout: A run that finishes no step within so many seconds is ended.

    Returns:
        The first place that differs by more than rounding, or None.

    Raises:
        UsageError: The job or its twin fails, or trains nothing.

    Example:
        >>> finding = fleetpipe.locate("train.py", nproc=2)    # doctest: +SKIP
        >>> print(finding)                                     # doctest: +SKIP
    """
    options = argparse.Namespace(
        script=Path(path),
        arguments=list(arguments),
        nproc=nproc,
        twin=list(twin),
        twin_arguments=twin_arguments,
        steps=steps,
        record=None if record is None else Path(record),
        against=None if against is None else Path(against),
        log_dir=str(log_dir),
        timeout=timeout,
        log_level=streams.DEFAULT_LEVEL,
        json=True,
    )
    return find_difference(options)[0]


def _run_recorded(options: argparse.Namespace, setting: Setting) -> None:
    """Runs the script in processes that record it, as a job or as a one-device twin, to its end.

    Args:
        options: The arguments of the command.
        setting: What the processes record; with the folder of a job they run its twin.

    Raises:
        UsageError: The script fails, or takes too long.
    """
    is_twin = bool(setting.job)
    record_setting = {SETTING: json.dumps(setting._asdict())}
    environment = {**streams.environment(options.log_level), **record_setting}
    words = script.script_words(options)
    if is_twin:
        environment = {k: v for k, v in environment.items() if not k.startswith("PADDLE_TRAINER")}
        environment.update(pair.split("=", 1) for pair in options.twin or ())
        words += shlex.split(options.twin_arguments or "")
    count = 1 if is_twin else options.nproc
    command = [sys.executable, str(script.LAUNCHED), "locate", "--nproc", str(count)]
    command += ["--log-dir", options.log_dir, "--log-level", options.log_level, *words]
    quiet = is_twin or options.json
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet else None)
    failure = _await_end(process, Path(setting.folder), options.timeout)
    if failure:
        raise UsageError(
            f"the {'twin' if is_twin else 'job'} failed before it had {setting.steps} steps",
            where=str(options.script),
            got=failure,
            cause="at degrees 1 the script needs other options" if is_twin else None,
            fix="say how it runs at degrees 1: --twin NAME=VALUE, or --twin-arguments '--pp 1'"
            if is_twin
            else "make the script run first: fleetpipe run",
        )


def _await_end(process: subprocess.Popen[bytes], folder: Path, limit: float) -> str:
    """Waits until a run ends, and ends it if it finishes no step within a limit.

    Args:
        process: The process of the run.
        folder: The folder of its record, which gets a file for each step.
        limit: Seconds.

    Returns:
        The failure in words; "" without one.
    """
    steps = -1  # the files of finished steps
    while steps != (steps := sum(1 for _ in folder.iterdir())):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
            return f"exit code {code}" if code else ""
    for end in (process.send_signal, process.send_signal, lambda _: process.kill()):
        # The launcher passes the first signal on to its ranks, and kills them at the second.
        end(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    return f"no step was finished within {limit:g} seconds (--timeout)"
