"""Which layout goes on from which, as a table: ``python -m tests.checkpoint.matrix [PYTHON..]``.

Every layout trains two steps, saves, and trains two more. Each restores all of these, saves
again at once, and trains two steps. What is restored must be the same bytes; the losses of the two
steps have the same bits or agree to rounding. Each further PYTHON is that of an environment with
another Paddle, which reads what the others wrote as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import ColumnParallelLinear, LayerDesc, RowParallelLinear
from fleetpipe.static import pipeline_of
from tests import byhand
from tests.jobs import ROWS, job
from tests.launching import ROOT
from tests.pipelines import pipeline
from tests.static.networks import static_mode, strategy_of

WIDTH, CLASSES, BLOCKS, MICRO_BATCHES = 8, 4, 4, 4
#: Layouts of one process, with the arguments of a job; a number is the stages of a program.
ALONE: dict[str, Any] = {
    "single": {},
    "pp 2": {"pp": 2},
    "pp 4": {"pp": 4},
    "v 2": {"pp": 2, "schedule": "Interleaved1F1B"},
    "ZBV": {"pp": 2, "schedule": "ZBV"},
    "static pp 2": 2,
    "static pp 4": 4,
}
#: Of two processes.
OF_TWO: dict[str, Any] = {
    "mp 2": {"mp": 2},
    "dp 2": {"dp": 2, "micro_batches": 2},
    "sharding 2": {"sharding": 2, "micro_batches": 2},
}
LAYOUTS = {**ALONE, **OF_TWO}
VERSION: str = paddle.__version__
#: Folder of a checkpoint, or what is found of it, by version and layout.
Found = dict[str, dict[str, Any]]


class Block(nn.Layer):
    """Two products that tensor-parallel ranks share, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True)
        self.norm = nn.BatchNorm1D(WIDTH)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(nn.functional.tanh(self.up(x))))


#: The names of a block's tensors, in the order in which either graph mode makes them.
OF_BLOCK = [
    *(f"{layer}.{kind}" for layer in ("up", "down", "norm") for kind in ("weight", "bias")),
    *("norm._mean", "norm._variance"),
]


def feed(step: int) -> dict[str, np.ndarray]:
    """The batch of a step."""
    numbers = np.random.default_rng(step)
    rows = MICRO_BATCHES * ROWS
    return {
        "x": numbers.standard_normal((rows, WIDTH)).astype("float32"),
        "y": numbers.integers(0, CLASSES, (rows, 1)),
    }


class Dynamic:
    """The network in the job of now."""

    names: Any = None

    def __init__(self, schedule: str) -> None:
        chunks = {"num_virtual_pipeline_stages": 2} if schedule != "1F1B" else {}
        layers = [*(LayerDesc(Block) for _ in range(BLOCKS)), LayerDesc(nn.Linear, WIDTH, CLASSES)]
        self.model = pipeline(layers, **chunks)
        self.rate = paddle.optimizer.lr.StepDecay(0.01, 1)
        adamw = paddle.optimizer.AdamW(self.rate, parameters=self.model.parameters())
        self.optimizer = fleet.distributed_optimizer(adamw)
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> float:
        replicas = self.model.replicas
        rows = [
            paddle.to_tensor(np.split(feed(step)[name], replicas.ranks)[replicas.rank])
            for name in "xy"
        ]
        return float(self.model.train_batch(rows, self.optimizer, self.rate).item())


class Static:
    """The network as a program of some stages."""

    def __init__(self, stages: int) -> None:
        fleet.init(is_collective=True, strategy=strategy_of())
        with paddle.static.device_guard("gpu:0"):
            value = paddle.static.data("x", [-1, WIDTH])
            label = paddle.static.data("y", [-1, 1], "int64")
        for block in range(BLOCKS):
            with paddle.static.device_guard(f"gpu:{block * stages // BLOCKS}"):
                up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
                value = nn.BatchNorm1D(WIDTH)(value + down(nn.functional.tanh(up(value))))
        with paddle.static.device_guard(f"gpu:{stages - 1}"):
            logits = nn.Linear(WIDTH, CLASSES)(value)
            self.loss = nn.functional.cross_entropy(logits, label)
        self.rate = paddle.optimizer.lr.StepDecay(0.01, 1)
        optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(self.rate), strategy_of())
        optimizer.minimize(self.loss)
        self.exe = paddle.static.Executor(paddle.CPUPlace())
        self.exe.run(paddle.static.default_startup_program())
        lasting = [f"{block}.{name}" for block in range(BLOCKS) for name in OF_BLOCK]
        lasting += [f"{BLOCKS}.weight", f"{BLOCKS}.bias"]
        self.names = dict(zip(pipeline_of().declared, lasting))
        self.objects = {"model": paddle.static.default_main_program(), "optimizer": optimizer}

    def train(self, step: int) -> float:
        (loss,) = self.exe.run(feed=feed(step), fetch_list=[self.loss])
        self.rate.step()
        return float(loss)


@contextmanager
def begun(layout: str) -> Iterator[Any]:
    """Builds the network under a layout."""
    paddle.seed(5)
    described = LAYOUTS[layout]
    if isinstance(described, int):
        with static_mode():
            yield Static(described)
        return
    with job(**{"micro_batches": MICRO_BATCHES, **described}):
        yield Dynamic(described.get("schedule", "1F1B"))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of the whole model and its optimizer in the one step of a folder."""
    files = folder.glob("step-*/*.safetensors")
    return {path.name: path.read_bytes() for path in files if "replicas" not in path.name}


def write(home: Path, layouts: Sequence[str]) -> Found:
    """Trains and saves; returns the losses of the two steps after."""
    found = {}
    for layout in layouts:
        with begun(layout) as run:
            for step in range(2):
                run.train(step)
            manager = fleetpipe.CheckpointManager(home / VERSION / layout, names=run.names)
            manager.save(2, **run.objects)
            found[layout] = [run.train(step) for step in (2, 3)]
    return {VERSION: found}


def read(home: Path, layouts: Sequence[str]) -> Found:
    """Restores what all have written; returns whether it is the same, and the losses after it."""
    found: Found = {}
    versions = sorted(path.name for path in home.iterdir() if (path / "single").is_dir())
    for layout in layouts:
        with begun(layout) as run:
            for version in versions:
                for writer in LAYOUTS:
                    saved = home / version / writer
                    copy = home / "copies" / f"{VERSION} {layout} {version} {writer}"
                    fleetpipe.CheckpointManager(saved, names=run.names).restore(**run.objects)
                    fleetpipe.CheckpointManager(copy, names=run.names).save(2, **run.objects)
                    same = contents(copy) == contents(saved)
                    losses = [run.train(step) for step in (2, 3)]
                    found.setdefault(version, {})[f"{writer} > {layout}"] = same, losses
    return found


ACTS: dict[str, Callable[[Path, Sequence[str]], Found]] = {"write": write, "read": read}


def act(home: Path, what: str) -> None:
    """Writes or reads with this Paddle, under all layouts; notes what it finds in a file."""
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tests.checkpoint import matrix
        found = matrix.ACTS[{what!r}](Path({str(home)!r}), [*matrix.OF_TWO])
        matrix.note(Path({str(home)!r}), {what!r}, "of two", found)
    """
    note(home, what, "alone", ACTS[what](home, [*ALONE]))
    byhand.run(script, 2, folder=home, timeout=600)


def note(home: Path, what: str, processes: str, found: Found) -> None:
    """Writes down what was found; the first rank does."""
    if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        (home / f"{what} {VERSION} {processes}.json").write_text(json.dumps(found))


def noted(home: Path, what: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What was found, by the Paddle that did it and the one that had written."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in home.glob(f"{what} *.json"):
        for version, part in json.loads(path.read_text()).items():
            found.setdefault((path.name.split()[1], version), {}).update(part)
    return found


def cells(home: Path) -> dict[tuple[str, str], dict[str, float]]:
    """By reading and writing Paddle and by layouts: how far the losses are apart; inf is damage."""
    wrote = {version: losses for (_, version), losses in noted(home, "write").items()}
    found = {}
    for (reader, version), pairs in noted(home, "read").items():
        row = {}
        for pair, (same, losses) in pairs.items():
            expected = wrote[version][pair.partition(" > ")[0]]
            apart = max(abs(one - other) for one, other in zip(losses, expected))
            row[pair] = apart if same else float("inf")
        found[reader, version] = row
    return found


def show(found: dict[tuple[str, str], dict[str, float]]) -> None:
    """Prints a table for each pair of versions; one for those whose tables are alike."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for versions, row in found.items():
        tables.setdefault(_table(row), []).append(versions)
    for table, versions in tables.items():
        print(", ".join(f"written on {wrote}, read on {read}" for read, wrote in versions))
        rounded = [apart for pair in versions for apart in found[pair].values() if apart]
        print(f"largest difference of a loss: {max(rounded, default=0.0):.1e}\n")
        print(table)


def _table(row: dict[str, float]) -> str:
    lines = [
        "| saved under | " + " | ".join(LAYOUTS) + " |",
        "|---|" + ":-:|" * len(LAYOUTS),
    ]
    for writer in LAYOUTS:
        marks = [_mark(row[f"{writer} > {reader}"]) for reader in LAYOUTS]
        lines.append(f"| {writer} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def _mark(apart: float) -> str:
    return "=" if apart == 0 else "DAMAGED" if apart == float("inf") else "≈"


def main(pythons: Sequence[str]) -> int:
    """Runs all and prints the tables; 1 where something was not restored."""
    home = Path(tempfile.mkdtemp())
    try:
        for what in ACTS:
            for python in (sys.executable, *pythons):
                command = [python, "-m", "tests.checkpoint.matrix", "--act", str(home), what]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    print(done.stdout, done.stderr)
                    return 1
        found = cells(home)
    finally:
        shutil.rmtree(home)
    show(found)
    return int(any(apart == float("inf") for row in found.values() for apart in row.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--act"]:
        act(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))
