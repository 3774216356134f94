"""What the static-graph examples share: options, data, and the comparison with one program."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleetpipe import fleet
from fleetpipe.static import SingleProgram, full_state_dict, pipeline_of

WORLD = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
TOLERANCE = 1e-6


def options(description: str, steps: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that both examples take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--schedule", default="1F1B", help="schedule by name, e.g. F-then-B")
    parser.add_argument("--accumulate-steps", type=int, default=4, help="micro-batches of a batch")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--report", type=Path, help="compare with one program; write it as JSON")
    return parser


def strategy(args: argparse.Namespace) -> Any:
    """Returns the strategy that the options ask for."""
    chosen = fleet.DistributedStrategy()
    chosen.pipeline = True
    chosen.pipeline_configs = {
        "accumulate_steps": args.accumulate_steps,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": args.schedule,
    }
    return chosen


def batches(
    images: np.ndarray, labels: np.ndarray, rows: int, steps: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields feeds of ``rows`` rows in the order of the data, from the start again."""
    for step in range(steps):
        chosen = np.arange(step * rows, (step + 1) * rows) % len(images)
        yield {"image": images[chosen], "label": labels[chosen]}


class Comparison:
    """The same network as one program, trained beside the pipeline on the rank of the last stage.

    Making and finishing it are collective over the pipeline.
    """

    def __init__(
        self, build: Callable[[], Sequence[Any]], optimizer: Callable[[], Any], micro_batches: int
    ) -> None:
        pipeline = pipeline_of()
        placement = pipeline.schedule.placement
        owner = placement.rank_of(placement.stages - 1)
        state = full_state_dict()
        self.owner = pipeline.local or pipeline.job.group().rank == owner
        self.owner = self.owner and pipeline.job.replicas().rank == 0
        self._losses: list[list[float]] = [[], [], []]
        self._singles: list[SingleProgram] = []
        if self.owner:
            for count in (micro_batches, 1):
                single = SingleProgram(build, optimizer, count)
                single.load(state)
                self._singles.append(single)

    def step(self, feed: dict[str, np.ndarray], loss: Any) -> None:
        """Trains the single programs on a batch; ``loss`` is the pipeline's."""
        if self.owner:
            values = [loss, *(single.step(feed)[0] for single in self._singles)]
            for known, value in zip(self._losses, values):
                known.append(float(value))

    def finish(self, path: Path, statistics: bool, **more: Any) -> bool:
        """Compares the parameters, writes the report, and tells whether all is equal.

        Args:
            path: Where the report goes.
            statistics: Whether running statistics are the same as the single program's; those of
                several replicas each have a part of the batch.
            **more: More for the report.
        """
        state = full_state_dict()
        if not self.owner:
            return True
        pipeline_loss, single_loss, whole = self._losses
        expected = self._singles[0].state()
        trained = self._singles[0].parameters
        names = [name for name in expected if statistics or name in trained]
        parameter = max(float(np.abs(state[n] - expected[n]).max()) for n in names)
        loss = max(abs(a - b) for a, b in zip(pipeline_loss, single_loss))
        report = {
            "steps": len(single_loss),
            "single_loss": single_loss,
            "pipeline_loss": pipeline_loss,
            "whole_batch_loss": whole,
            "max_abs_diff": loss,
            "max_abs_param_diff": parameter,
            "bit_exact": loss == 0 and parameter == 0,
            "mp": 1,
            "paddle": paddle.__version__,
            **more,
        }
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        verdict = "bit-exact" if report["bit_exact"] else f"losses {loss:g}, state {parameter:g}"
        print(f"beside one program: {verdict}", flush=True)
        return bool(report["bit_exact"] or (more["dp"] > 1 and parameter <= TOLERANCE))
