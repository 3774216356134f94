"""Measures what a checkpoint that is saved in the background costs the steps that go on meanwhile.

    python benchmarks/async_save.py [--ranks 2] [--repeats 30] [--rows 512] [--json FILE]

One job, in which blocks of steps with and without a save take turns: two blocks without one, whose
ratio is the noise of the machine, then a save and a block as long, in which it is written. It is
waited for before the next block, and where it took longer than its block that is said. Each rank
trains a stage of Linear layers on one thread; ``--blocks`` says how large it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from statistics import median, quantiles
from typing import Any

WIDTH = 1024
MICRO_BATCHES = 8
#: Steps of a block: enough for the writer to end in one.
BLOCK = 2


class Clock:
    """What passes between two looks, for this thread: seconds, of a processor, page faults."""

    def __init__(self) -> None:
        self._then = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), float(getrusage(RUSAGE_THREAD).ru_minflt)

    def look(self) -> dict[str, float]:
        """Returns what has passed since the last look."""
        then, self._then = self._then, self._now()
        names = ("seconds", "processor", "faults")
        return {name: now - before for name, before, now in zip(names, then, self._then)}


def work(options: argparse.Namespace) -> None:
    """Trains as one rank, and writes what it measured."""
    import paddle
    from paddle import nn

    import fleetpipe
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": options.ranks}
    rows = options.rows // MICRO_BATCHES
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": rows}
    fleet.init(is_collective=True, strategy=strategy)
    layers = [LayerDesc(nn.Linear, WIDTH, WIDTH)] * (options.blocks * options.ranks)
    pipeline = PipelineLayer(layers, num_stages=options.ranks, loss_fn=nn.MSELoss())
    model = fleet.distributed_model(pipeline)
    adam = paddle.optimizer.Adam(1e-4, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    manager = fleetpipe.CheckpointManager(
        Path(options.folder) / "run", max_to_keep=1, async_save=True
    )
    data = [paddle.randn([options.rows, WIDTH]), paddle.randn([options.rows, WIDTH])]

    def block() -> None:
        for _ in range(BLOCK):
            model.train_batch(data, optimizer)

    block()
    found: list[dict[str, dict[str, float]]] = []
    for number in range(options.repeats + 1):
        clock = Clock()
        row = {}
        for name in ("without", "without again"):
            block()
            row[name] = clock.look()
        manager.save(number, model=model, optimizer=optimizer)
        row["call"] = clock.look()
        block()
        row["with"] = clock.look()
        row["late"] = {"seconds": float(writing())}
        manager.wait()
        row["wait"] = clock.look()
        found.append(row)
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    (Path(options.folder) / f"found.{rank}").write_text(json.dumps(found))
    fleet.shutdown()


def writing() -> bool:
    """Whether the thread that writes has not ended."""
    return any("checkpoint" in thread.name for thread in threading.enumerate())


def measure(options: argparse.Namespace, folder: Path) -> list[list[dict[str, Any]]]:
    """Runs the job; returns what each rank measured, the first save first."""
    command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", str(folder / "log")]
    command += ["--nproc_per_node", str(options.ranks), __file__, "--folder", str(folder)]
    for name in ("ranks", "repeats", "rows", "blocks"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
    if done.returncode:
        raise SystemExit((folder / "output").read_text())
    files = [folder / f"found.{rank}" for rank in range(options.ranks)]
    return [json.loads(file.read_text()) for file in files]


def spread(values: list[float], form: str) -> str:
    """Returns median, and the range of the middle half and of all."""
    low, _, high = quantiles(values, n=4)
    numbers = median(values), low, high, min(values), max(values)
    return "{}  ({} to {}; all {} to {})".format(*(format(number, form) for number in numbers))


def report(found: list[list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """Prints the figures. Of a block that of the slowest rank counts: they wait for each other."""
    first, *rows = zip(*found)
    calls = [one["call"] for row in rows for one in row]
    step = median(_most(row, "without", "seconds") for row in rows) / BLOCK
    busy = median(one["without"]["processor"] for row in rows for one in row) / BLOCK
    saved = options.blocks * 3 * 4 * WIDTH * (WIDTH + 1) / 1e6
    print(f"{options.ranks} ranks, {saved:.0f} MB saved of each, {len(rows)} repeats")
    print(f"a step: {step:.3f} s, of which {busy:.3f} s on a processor (medians)")
    lines = [
        (f"steps {words} / those before without, by {how}", _ratios(rows, name, what), ".3f")
        for what, how in (("seconds", "the clock"), ("processor", "the training thread's time"))
        for name, words in (("without again", "without a save"), ("with", "with one in flight"))
    ]
    spent = [1e3 * call["processor"] for call in calls]
    lines.append(("the call, ms on a processor", spent, ".1f"))
    lines.append(("the call, % of a step on a processor", [ms / busy / 10 for ms in spent], ".2f"))
    lines.append(("the call, page faults", [call["faults"] for call in calls], ".0f"))
    begun = max((one["call"] for one in first), key=lambda call: float(call["faults"]))
    for title, values, form in lines:
        print(f"{title:74}", spread(values, form))
    print(f"the first call: {1e3 * begun['processor']:.0f} ms, {begun['faults']:.0f} page faults")
    late = sum(one["late"]["seconds"] for row in rows for one in row)
    print(f"saves that were not written when their block ended: {late:.0f} of {len(calls)}")


def _ratios(rows: Any, name: str, what: str) -> list[float]:
    return [_most(row, name, what) / _most(row, "without", what) for row in rows]


def _most(row: Any, name: str, what: str) -> float:
    return max(float(one[name][what]) for one in row)


def main() -> None:
    """Measures, as the process that starts the ranks; or trains, as a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rows", type=int, default=512, help="rows of a batch")
    parser.add_argument(
        "--blocks", type=int, default=8, help="layers of each rank, 13 MB saved each"
    )
    parser.add_argument("--folder", default=None, help="where to write; by default a temporary one")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all that was measured"
    )
    options = parser.parse_args()
    if "PADDLE_TRAINER_ID" in os.environ:
        work(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    report(found, options)


if __name__ == "__main__":
    main()
