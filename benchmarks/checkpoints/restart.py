"""Kills a rank of jobs that go on from disk, from memory, by healing, or with fewer ranks.

    python benchmarks/checkpoints/restart.py [--kills 10] [--ranks 3] [--dp 1] [--seed 1]

Each round kills the same rank before the same operation of step 22 (SIGKILL), once in a job of each
kind. A pause is a long time between the ends of two steps, less a usual one: the longest on any
rank, or the two of the first rank before a job goes on with a stage less and with all again. The
final models of all jobs are compared with that of a job which nobody disturbs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, parser, report, started, wrapped

STEPS, KILLED, SAVED, WIDTH, MICRO_BATCHES, ROWS = 40, 22, 5, 256, 4, 4


def train() -> None:
    """Trains as one rank, and prints when each step ended, and the model's hash."""
    import paddle
    from paddle import nn

    import fleetpipe
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc
    from tests.chaos import Struck

    ranks, dp = int(os.environ["PADDLE_TRAINERS_NUM"]), int(sys.argv[1])
    killed = sys.argv[2:] and sys.argv[2] == os.environ["PADDLE_TRAINER_ID"]
    started(ranks // dp, MICRO_BATCHES, ROWS, dp=dp)
    paddle.seed(7)
    layers = [part for _ in range(6) for part in (LayerDesc(nn.Linear, WIDTH, WIDTH), nn.GELU())]
    model, optimizer = wrapped(layers, nn.MSELoss())
    folder = os.environ["FLEETPIPE_CHECKPOINT_DIR"]
    manager = fleetpipe.CheckpointManager(folder, save_interval=SAVED, max_to_keep=2)
    run = fleetpipe.resume(model, optimizer, manager=manager)
    if killed and run.step == 0:
        model.observe(Struck(sys.argv[3], KILLED))
    for step in run.steps(STEPS):
        paddle.seed(step)
        rows = [paddle.randn([MICRO_BATCHES * ROWS, WIDTH]) for _ in range(2)]
        model.train_batch(rows, optimizer)
        time.sleep(0.02)
        sys.stdout.write(f"ended {time.monotonic()} {step}\n")
        sys.stdout.flush()
    sys.stdout.write(f"hash {fleetpipe.model_hash(model)}\n")
    fleet.shutdown()


class Run(NamedTuple):
    """What a job printed.

    Attributes:
        waits: Of each rank the seconds between the ends of two steps, less the usual ones.
        repeated: Steps that were done again, the one in which a rank died left out.
        hashes: Of the models that the ranks end with.
    """

    waits: list[list[float]]
    repeated: int
    hashes: set[str]


def run(options: argparse.Namespace, words: str, kill: list[str], folder: Path) -> Run:
    """Runs a job; ``kill`` is a rank and an operation, or empty."""
    folder.mkdir()
    log = folder / "log"
    command = [sys.executable, "-m", "fleetpipe", "launch", "--nproc", str(options.ranks)]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(log)]
    command += [*words.split(), __file__, str(options.dp), *kill]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        where = {"stdout": output, "stderr": output, "env": environment}
        subprocess.run(command, check=True, timeout=300, **where)
    found = Run([], 0, set())
    for file in sorted(log.glob("workerlog.*")):
        lines = [line.split() for line in file.read_text().splitlines()]
        ended = [(float(line[1]), line[2]) for line in lines if line and line[0] == "ended"]
        gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(ended)]
        found.waits.append([gap - statistics.median(gaps) for gap in gaps])
        counts = Counter(step for _, step in ended)
        again = sum(count > 1 for count in counts.values())
        hashes = found.hashes | {line[1] for line in lines if line and line[0] == "hash"}
        found = Run(found.waits, max(found.repeated, again), hashes)
    return found


def main() -> None:
    """Runs the jobs and reports."""
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--dp", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    chance, pipeline = random.Random(arguments.seed), arguments.ranks // arguments.dp
    fewer = f"--least {arguments.ranks - arguments.dp} --max-restart 0 --wider-after 0.1"
    kinds = {"from disk": "", "from memory": "--keep-state", "healed": "--heal", "fewer": fewer}
    pauses: dict[str, list[float]] = {kind: [] for kind in [*kinds, "all ranks again"]}
    repeated: dict[str, list[float]] = {kind: [] for kind in kinds}
    other = 0
    with tempfile.TemporaryDirectory() as place:
        undisturbed = run(arguments, "", [], Path(place, "undisturbed"))
        for kill in range(arguments.kills):
            stage, part = chance.randrange(pipeline), chance.randrange(MICRO_BATCHES)
            at = chance.choice([f"F{stage}.{part}", f"B{stage}.{part}", "REDUCE", "STEP"])
            # Stages are numbered along the pipeline, and replicas lie outside of it.
            rank = chance.randrange(arguments.dp) * pipeline + stage
            for kind, words in kinds.items():
                found = run(arguments, words, [str(rank), at], Path(place, f"{kill} {kind}"))
                repeated[kind].append(found.repeated)
                other += found.hashes != undisturbed.hashes
                if words is fewer:
                    # The ends of two attempts, in their order.
                    begins = sorted(found.waits[0])[-2:]
                    narrow, wide = (wait for wait in found.waits[0] if wait in begins)
                    pauses[kind].append(narrow)
                    pauses["all ranks again"].append(wide)
                else:
                    pauses[kind].append(max(map(max, found.waits)))
    figures = [Figure(f"{kind}: pause", values, "s") for kind, values in pauses.items()]
    figures += [Figure(f"{kind}: steps repeated", values) for kind, values in repeated.items()]
    report([*figures, Figure("jobs that end with another model", [other])], arguments.json)


if __name__ == "__main__":
    train() if "PADDLE_TRAINER_ID" in os.environ else main()
