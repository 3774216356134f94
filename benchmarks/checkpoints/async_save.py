"""Measures what a checkpoint that is saved in the background costs the steps that go on meanwhile.

    python benchmarks/checkpoints/async_save.py [--ranks 2] [--repeats 30] [--rows 512]

One job, in which blocks of steps with and without a save take turns: two blocks without one, whose
ratio is the noise of the machine, then a save and a block as long, in which it is written. It is
waited for before the next block, and where it took longer than its block that is said. Each rank
trains a stage of Linear layers on one thread; ``--blocks`` says how large it is.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import Any

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started, wrapped

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


def work(options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Trains as one rank, and returns what it measured."""
    import paddle
    from paddle import nn

    import fleetpipe
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc

    started(options.ranks, MICRO_BATCHES, options.rows // MICRO_BATCHES)
    layers = [LayerDesc(nn.Linear, WIDTH, WIDTH)] * (options.blocks * options.ranks)
    model, optimizer = wrapped(layers, nn.MSELoss())
    manager = fleetpipe.CheckpointManager(
        Path(options.folder) / "run", max_to_keep=1, async_save=True
    )
    paddle.seed(1)  # all ranks have the same rows
    data = [paddle.randn([options.rows, WIDTH]), paddle.randn([options.rows, WIDTH])]

    def block() -> None:
        for _ in range(BLOCK):
            model.train_batch(data, optimizer)

    block()
    measured: list[dict[str, dict[str, float]]] = []
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
        measured.append(row)
    fleet.shutdown()
    return measured


def writing() -> bool:
    """Whether the thread that writes has not ended."""
    return any("checkpoint" in thread.name for thread in threading.enumerate())


def figures_of(answers: list[Any], blocks: int) -> list[Figure]:
    """Returns the figures. Of a block that of the slowest rank counts: they wait for each other."""
    first, *rows = zip(*answers)
    calls = [one["call"] for row in rows for one in row]
    busy = [one["without"]["processor"] / BLOCK for row in rows for one in row]
    begun = max((one["call"] for one in first), key=lambda call: float(call["faults"]))
    figures = [
        Figure("saved of each rank", [blocks * 3 * 4 * WIDTH * (WIDTH + 1) / 1e6], "MB"),
        Figure("a step", [_most(row, "without", "seconds") / BLOCK for row in rows], "s"),
        Figure("a step, processor", busy, "s"),
    ]
    figures += [
        Figure(f"steps {words} / those before, {how}", _ratios(rows, name, what))
        for what, how in (("seconds", "clock"), ("processor", "training thread's processor"))
        for name, words in (("without again", "without a save"), ("with", "with one in flight"))
    ]
    return [
        *figures,
        Figure("the call, processor", [1e3 * call["processor"] for call in calls], "ms"),
        Figure("the call, page faults", [call["faults"] for call in calls]),
        Figure("the first call, processor", [1e3 * begun["processor"]], "ms"),
        Figure("the first call, page faults", [begun["faults"]]),
        Figure(
            "saves that outlast their block", [sum(o["late"]["seconds"] for r in rows for o in r)]
        ),
    ]


def _ratios(rows: Any, name: str, what: str) -> list[float]:
    return [_most(row, name, what) / _most(row, "without", what) for row in rows]


def _most(row: Any, name: str, what: str) -> float:
    return max(float(one[name][what]) for one in row)


def main() -> None:
    """Measures, as the process that starts the ranks; or trains, as a rank."""
    options = parser(__doc__, repeats=30)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rows", type=int, default=512, help="rows of a batch")
    options.add_argument(
        "--blocks", type=int, default=8, help="layers of each rank, 13 MB saved each"
    )
    options.add_argument("--folder", help="where to write; by default a temporary one")
    arguments = options.parse_args()
    if is_rank():
        answer(work(arguments))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        answers = on_ranks(arguments.ranks, "--folder", folder)
    report(figures_of(answers, arguments.blocks), arguments.json)


if __name__ == "__main__":
    main()
