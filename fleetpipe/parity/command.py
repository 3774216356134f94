"""``fleetpipe parity``: shadows every ``train_batch`` of a training script with its reference."""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleetpipe.dygraph import PipelineParallel
from fleetpipe.parity.reference import of_same_layers
from fleetpipe.parity.session import Session

LAUNCHED = Path(__file__).with_name("launched.py")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command, and what runs it."""
    parser.set_defaults(run=run)
    parser.add_argument("--nproc", type=int, default=1, help="processes to launch (default: 1)")
    parser.add_argument("--report", type=Path, help="write the result as JSON")
    parser.add_argument("script", type=Path, help="a training script that uses fleetpipe.fleet")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    """Runs the script with its reference beside it.

    Returns:
        0 where no bit differs, 1 where one does, 2 where nothing was compared.
    """
    if not options.script.exists():
        print(f"fleetpipe parity: there is no file {options.script}", file=sys.stderr)
        return 2
    if options.nproc > 1 and "PADDLE_TRAINER_ID" not in os.environ:
        return _launch(options)
    return shadow(options.script, options.arguments, options.report)


def _launch(options: argparse.Namespace) -> int:
    arguments = [str(options.script), *options.arguments]
    if options.report:
        arguments = ["--report", str(options.report), *arguments]
    launcher = [sys.executable, "-m", "paddle.distributed.launch"]
    command = [*launcher, "--nproc_per_node", str(options.nproc), str(LAUNCHED), *arguments]
    return 0 if subprocess.run(command, check=False).returncode == 0 else 1


def shadow(script: Path, arguments: list[str], report: Path | None) -> int:
    """Runs ``script`` in this process, each ``train_batch`` beside its reference."""
    sessions: dict[int, Session] = {}
    original = PipelineParallel.train_batch

    def train_batch(
        pipeline: Any, data: Any, optimizer: Any, lr_scheduler: Any = None, scaler: Any = None
    ) -> Any:
        if id(pipeline) not in sessions:
            reference = of_same_layers(pipeline.layers, optimizer)
            alone = functools.partial(original, pipeline)
            sessions[id(pipeline)] = Session(pipeline, optimizer, reference, alone)
        _, loss = sessions[id(pipeline)].step(data, lr_scheduler, scaler)
        return loss

    wrapper: Any = PipelineParallel
    wrapper.train_batch = train_batch
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        wrapper.train_batch = original
    reports = [session.report for session in sessions.values()]
    for finding in reports:
        print(finding.verdict(), flush=True)
    if not reports:
        print("fleetpipe parity: the script never called train_batch", file=sys.stderr)
        return 2
    if report and os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        report.write_text(json.dumps([finding.as_dict() for finding in reports], indent=1))
    return 0 if all(finding.passed for finding in reports) else 1
