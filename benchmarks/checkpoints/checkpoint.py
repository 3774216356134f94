"""Measures checkpoints of one process beside ``paddle.save``.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints/checkpoint.py [--megabytes 1000] [--repeats 5]

A model and Adam's moments of that size are written and read in turn by both. ``paddle.save`` is
given a file that is synced afterwards, as ours are; its files have no checksums. What a save in the
background costs, ``async_save.py`` measures.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

import fleetpipe
from benchmarks.figures import Figure, parser, report

WIDTH = 1024
#: Bytes of one layer, with its two moments.
_LAYER_BYTES = 3 * 4 * WIDTH * (WIDTH + 1)


class Run:
    """Linear layers and Adam, which has stepped once."""

    def __init__(self, layers: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.adam = paddle.optimizer.Adam(1e-4, parameters=self.model.parameters())
        self.objects = {"model": self.model, "optimizer": self.adam}
        self.step(paddle.ones([4, WIDTH]))

    def step(self, rows: Any) -> None:
        """Trains on some rows."""
        self.model(rows).mean().backward()
        self.adam.step()
        self.adam.clear_grad()


def seconds(act: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def saved_by_paddle(run: Run, path: Path) -> None:
    """Saves as Paddle's users do, and waits for the disk."""
    for name, thing in (("model.pdparams", run.model), ("adam.pdopt", run.adam)):
        paddle.save(thing.state_dict(), str(path / name))
        descriptor = os.open(path / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def loaded_by_paddle(run: Run, path: Path) -> None:
    """Loads what :func:`saved_by_paddle` wrote."""
    run.model.set_state_dict(paddle.load(str(path / "model.pdparams")))
    run.adam.set_state_dict(paddle.load(str(path / "adam.pdopt")))


def write_and_read(run: Run, home: Path, repeats: int) -> list[Figure]:
    """Returns the seconds of writing and of reading, of both."""
    manager = fleetpipe.CheckpointManager(home / "fleetpipe", max_to_keep=1)
    folder = home / "paddle"
    folder.mkdir()
    acts: dict[str, Callable[[], object]] = {
        "paddle.save": lambda: saved_by_paddle(run, folder),
        "save": lambda: manager.save(1, **run.objects),
        "paddle.load": lambda: loaded_by_paddle(run, folder),
        "restore": lambda: manager.restore(**run.objects),
    }
    times = [{name: seconds(act) for name, act in acts.items()} for _ in range(repeats)]
    return [Figure(name, [row[name] for row in times], "s") for name in acts]


def main() -> None:
    """Prints the figures."""
    options = parser(__doc__, repeats=5)
    options.add_argument("--megabytes", type=int, default=1000, help="of parameters and moments")
    options.add_argument("--folder", help="where to write; by default a temporary one")
    arguments = options.parse_args()
    run = Run(max(1, arguments.megabytes * 1_000_000 // _LAYER_BYTES))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as home:
        report(write_and_read(run, Path(home), arguments.repeats), arguments.json)


if __name__ == "__main__":
    main()
