"""``fleetpipe parity``: runs a training script, and each of its batches through a reference too."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from fleetpipe import numerics
from fleetpipe.aliases import Nest, Scaler, Scheduler
from fleetpipe.arguments import using
from fleetpipe.compare import trail, whole_runs
from fleetpipe.dygraph import PipelineOptimizer, PipelineParallel
from fleetpipe.errors import UsageError
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api import replaced
from fleetpipe.parity.parity_report import Report
from fleetpipe.parity.reference import of_same_layers
from fleetpipe.parity.session import Calls, Session

#: The options that are passed on to each rank.
_OF_A_RANK = ("report", "steps", "record", "stop_after", "set")


def run(options: argparse.Namespace) -> int:
    """Runs the script and its reference, or with ``--whole`` the script in several ways.

    Returns:
        0 if no difference exceeds the tolerance, 1 if one does; 2 if there was nothing to compare.

    Raises:
        UsageError: The script runs no batch of a pipeline, or one that cannot be compared.
    """
    if options.whole:
        return whole_runs.compare_ways(options)
    if options.also:
        fix = "fleetpipe parity --whole .."
        raise UsageError("--also is one more way of --whole", got=options.also[0], fix=fix)
    if script.to_be_launched(options):
        values = {name: getattr(options, name) for name in _OF_A_RANK if getattr(options, name)}
        words = [[f"--{name.replace('_', '-')}", str(value)] for name, value in values.items()]
        code = script.launch(options, "parity", *chain(*words))
        return code if options.record or code in (0, 2) else 1
    if options.record is not None:
        return trail.run(options)
    return compare_script(options.script, options.arguments, options.report, options.steps)


def compare_script(
    file: Path, arguments: list[str], report: Path | None, last: int | None = None
) -> int:
    """Runs a script in this process, and compares each batch with the reference.

    Args:
        file: The script.
        arguments: Its arguments.
        report: The file for the result; None writes none.
        last: The number of steps after which the script ends; None sets no limit.

    Raises:
        UsageError: The script runs no batch of a pipeline, or one that cannot be compared.
    """
    numerics.repeat_bits()  # before the script uses cuBLAS
    sessions: dict[int, Session] = {}
    stepped = PipelineOptimizer.step
    originals = Calls(*(getattr(PipelineParallel, name) for name in Calls._fields))

    def session_of(pipeline: PipelineParallel) -> Session:
        """Returns the comparison of a pipeline, which begins with its first batch."""
        if id(pipeline) not in sessions:
            calls = Calls(*(functools.partial(call, pipeline) for call in originals))
            sessions[id(pipeline)] = Session(pipeline, of_same_layers(pipeline.layers), calls)
        return sessions[id(pipeline)]

    def train_batch(
        pipeline: PipelineParallel,
        data: Any,
        optimizer: Any,
        lr_scheduler: Scheduler | None = None,
        scaler: Scaler | None = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
        weights: Sequence[Fraction] | None = None,
    ) -> Nest:
        if loss_fn_idx:
            raise UsageError(
                "parity compares the loss of a batch by the first loss function",
                got=f"train_batch(.., loss_fn_idx={loss_fn_idx})",
                fix="leave it out while you compare",
            )
        if not isinstance(optimizer, PipelineOptimizer):
            return originals.train_batch(pipeline, data, optimizer)  # raises an error
        session = session_of(pipeline)
        session.train_with(optimizer)
        _, loss = session.step(data, lr_scheduler, scaler, return_micro_batch_loss, weights)
        if sum(one.report.steps for one in sessions.values()) == last:
            raise SystemExit(0)
        return loss

    def eval_batch(pipeline: PipelineParallel, *more: Any, **named: Any) -> Nest:
        return session_of(pipeline).eval_batch(*more, **named)

    def predict_batch(pipeline: PipelineParallel, *more: Any, **named: Any) -> Nest:
        return session_of(pipeline).predict_batch(*more, **named)

    def step(optimizer: PipelineOptimizer) -> None:
        """Steps an optimizer; the reference's too, if the script steps outside a batch."""
        stepped(optimizer)
        for session in sessions.values():
            session.follow_step(optimizer)

    # No observer, since the session first compares how the pipeline cuts the script's own data.
    calls = Calls(train_batch, eval_batch, predict_batch)
    methods = ((PipelineParallel, name, method) for name, method in calls._asdict().items())
    try:
        with replaced(*methods, (PipelineOptimizer, "step", step)), in_place_of_paddles():
            script.execute(file, arguments)
    except SystemExit as stop:
        if stop.code:
            raise
    return _report_verdicts([session.report for session in sessions.values()], report)


def _report_verdicts(reports: list[Report], file: Path | None) -> int:
    """Prints the report of each pipeline, and writes all to a file on rank 0.

    Returns:
        The exit code: 0 if all passed, else 1.

    Raises:
        UsageError: There is no report.
    """
    for finding in reports:
        print(finding.verdict(), flush=True)
    if not reports:
        raise UsageError(
            "NOTHING WAS COMPARED: the script never called train_batch, nor eval_batch or "
            "predict_batch",
            cause="it has no pipeline, is a static program, or calls forward_backward_pipeline",
            fix="train by train_batch; or compare in the script, by fleetpipe.parity.begin(model, "
            "optimizer, train_batch=..) with the function that trains a batch",
        )
    if file and os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        text = json.dumps([finding.as_dict() for finding in reports], indent=1)
        with using("--report", file, "a file that can be written"):
            file.write_text(text, encoding="utf-8")
    return 0 if all(finding.passed for finding in reports) else 1
