"""What all benchmarks share: options, ranks, a job, and figures as a table and as JSON.

A benchmark makes its ``parser``, starts its ranks by ``on_ranks`` where it needs some, which begin
a job by ``started`` and make their model by ``wrapped``, and ends with ``report``: ``run.py`` reads
the JSON of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: Where the ranks of a benchmark leave their answers.
ANSWERS = "FLEETPIPE_BENCHMARK_ANSWERS"
#: Characters of a failed job's logs that are shown.
TAIL = 4000


class Figure(NamedTuple):
    """Something that was measured, once or again and again.

    Attributes:
        name: What it is.
        values: Every measurement.
        unit: Of the values.
    """

    name: str
    values: Sequence[float]
    unit: str = ""

    def summary(self) -> dict[str, Any]:
        """Returns name, unit, median, range and number of measurements."""
        least, most = min(self.values), max(self.values)
        middle, count = statistics.median(self.values), len(self.values)
        row = {"figure": self.name, "unit": self.unit, "median": middle}
        return {**row, "least": least, "most": most, "count": count}


def parser(description: str, repeats: int | None = None) -> argparse.ArgumentParser:
    """Returns the options of a benchmark: ``--json``, and ``--repeats`` where it has a number."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    if repeats is not None:
        options.add_argument("--repeats", type=int, default=repeats, help="default: %(default)s")
    return options


def is_rank() -> bool:
    """Whether this process is one that ``on_ranks`` started."""
    return ANSWERS in os.environ


def on_ranks(ranks: int, *options: str) -> list[Any]:
    """Runs this script once more on each rank of a job; returns their answers in order.

    Args:
        ranks: Number of processes, of one thread each.
        options: Of the script, behind those that it has.

    Raises:
        SystemExit: The job failed; with the end of what its ranks wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", f"{folder}/log"]
        command += ["--nproc_per_node", str(ranks), *sys.argv, *options]
        # Theirs is the folder of the script, not the one from which this began.
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, ANSWERS: folder}
        environment = {**os.environ, **added}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            logs = sorted(Path(folder).glob("log/workerlog.*"))
            ends = [log.read_text(errors="replace")[-TAIL:] for log in logs]
            raise SystemExit("\n".join(["a job failed:", done.stderr[-TAIL:], *ends]))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def answer(value: Any) -> None:
    """Is what a rank does at its end: it leaves its answer for ``on_ranks``."""
    rank = os.environ["PADDLE_TRAINER_ID"]
    Path(os.environ[ANSWERS], f"{rank}.json").write_text(json.dumps(value))


def started(
    ranks: int, micro_batches: int, rows: int, schedule: str = "1F1B", dp: int = 1, **own: Any
) -> None:
    """Begins a job; ``own`` are entries of ``fleetpipe_configs``. Collective."""
    from fleetpipe import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": ranks, "dp_degree": dp}
    configs = {"accumulate_steps": micro_batches, "micro_batch_size": rows}
    strategy.pipeline_configs = {**configs, "schedule_mode": schedule}
    strategy.fleetpipe_configs = own
    fleet.init(is_collective=True, strategy=strategy)


def wrapped(
    layers: Sequence[Any], loss: Any, optimizer: str = "Adam", **options: Any
) -> tuple[Any, Any]:
    """Returns a pipeline of these layers in the job, and its optimizer, wrapped. Collective.

    Args:
        layers: Of a ``PipelineLayer``.
        loss: Its ``loss_fn``.
        optimizer: A class of ``paddle.optimizer``.
        options: Other arguments of it.
    """
    import paddle

    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import PipelineLayer

    topology = fleet.get_hybrid_communicate_group().topology()
    pipeline = PipelineLayer(list(layers), topology=topology, loss_fn=loss, **options)
    model = fleet.distributed_model(pipeline)
    made = getattr(paddle.optimizer, optimizer)(1e-4, parameters=model.parameters())
    return model, fleet.distributed_optimizer(made)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; the last two of its columns are numbers."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    sides = "<" * (len(columns) - 2) + ">>"
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths))
    return "\n".join(form.format(*line).rstrip() for line in (columns, *rows))


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the cells of a summary: figure with unit, median, range."""
    median, least, most = (f"{row[name]:.4g}" for name in ("median", "least", "most"))
    name = f"{row['figure']}, {row['unit']}" if row["unit"] else row["figure"]
    return name, median, f"{least} to {most}" if row["count"] > 1 else ""


def report(figures: Sequence[Figure], path: Path | None) -> None:
    """Prints the figures as a table and writes them as JSON where ``--json`` says."""
    rows = [figure.summary() for figure in figures]
    print(table(("figure", "median", "range"), [cells(row) for row in rows]))
    if path is not None:
        path.write_text(json.dumps({"figures": rows}, indent=1) + "\n", encoding="utf-8")
