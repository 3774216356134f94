"""Kills a rank of jobs that heal, start again and go on with fewer ranks: how long each stands.

    python benchmarks/checkpoints/healing.py [--pairs 10] [--ranks 3] [--dp 1] [--seed 1]

Each round kills the same rank before the same operation of step 20 (SIGKILL), once in a job. A
pause is a long time between the ends of two steps, less a usual one: the longest on any rank, or
the two of the first rank before a job goes on with a stage less and with all again. The final
models of all jobs are compared with that of a job which nobody disturbs.
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
from pathlib import Path

from benchmarks.figures import Figure, parser, report

STEPS, KILLED, WIDTH, MICRO_BATCHES, ROWS = 40, 20, 256, 4, 4


def train() -> None:
    """Trains as one rank, and prints when each step ended, and the model's hash."""
    import paddle
    from paddle import nn

    import fleetpipe
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
    from tests.chaos import Struck

    ranks, dp = int(os.environ["PADDLE_TRAINERS_NUM"]), int(sys.argv[1])
    killed = sys.argv[2:] and sys.argv[2] == os.environ["PADDLE_TRAINER_ID"]
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": ranks // dp, "dp_degree": dp}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(7)
    layers = [part for _ in range(6) for part in (LayerDesc(nn.Linear, WIDTH, WIDTH), nn.GELU())]
    topology = fleet.get_hybrid_communicate_group().topology()
    pipeline = PipelineLayer(layers, topology=topology, loss_fn=nn.MSELoss())
    model = fleet.distributed_model(pipeline)
    adam = paddle.optimizer.AdamW(parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    run = fleetpipe.resume(model, optimizer)
    if killed and run.step == 0:
        model.observe(Struck(sys.argv[3], KILLED))
    for step in run.steps(STEPS):
        paddle.seed(step)
        rows = [paddle.randn([MICRO_BATCHES * ROWS, WIDTH]) for _ in range(2)]
        model.train_batch(rows, optimizer)
        time.sleep(0.02)
        sys.stdout.write(f"ended {time.monotonic()}\n")
        sys.stdout.flush()
    sys.stdout.write(f"hash {fleetpipe.model_hash(model)}\n")
    fleet.shutdown()


def run(
    options: argparse.Namespace, words: str, kill: list[str], folder: Path
) -> tuple[list[list[float]], set[str]]:
    """Runs a job; returns each rank's seconds between steps, and the hashes of their last models.

    They are less the usual seconds. ``kill`` is a rank and an operation, or empty.
    """
    log = folder / "log"
    command = [sys.executable, "-m", "fleetpipe", "launch", "--nproc", str(options.ranks)]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(log)]
    command += [*words.split(), __file__, str(options.dp), *kill]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        where = {"stdout": output, "stderr": output, "env": environment}
        subprocess.run(command, check=True, timeout=300, **where)
    waits, hashes = [], set()
    for file in sorted(log.glob("workerlog.*")):
        lines = [line.split() for line in file.read_text().splitlines()]
        ends = [float(words[1]) for words in lines if words and words[0] == "ended"]
        gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        waits.append([gap - statistics.median(gaps) for gap in gaps])
        hashes |= {words[1] for words in lines if words and words[0] == "hash"}
    return waits, hashes


def main() -> None:
    """Runs the pairs and reports."""
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=10)
    options.add_argument("--ranks", type=int, default=3)
    options.add_argument("--dp", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    arguments = options.parse_args()
    chance, pipeline = random.Random(arguments.seed), arguments.ranks // arguments.dp
    fewer = f"--least {arguments.ranks - arguments.dp} --max-restart 0 --wider-after 0.1"
    kinds = {"heals": "--heal", "starts again": "--keep-state", "goes on with fewer": fewer}
    seconds: dict[str, list[float]] = {kind: [] for kind in [*kinds, "has all again"]}
    other = 0
    with tempfile.TemporaryDirectory() as place:
        _, undisturbed = run(arguments, "", [], _folder(place, "undisturbed"))
        for pair in range(arguments.pairs):
            stage, part = chance.randrange(pipeline), chance.randrange(MICRO_BATCHES)
            at = chance.choice([f"F{stage}.{part}", f"B{stage}.{part}", "REDUCE", "STEP"])
            # Stages are numbered along the pipeline, and replicas lie outside of it.
            rank = chance.randrange(arguments.dp) * pipeline + stage
            for kind, words in kinds.items():
                where = _folder(place, f"{pair} {kind}")
                waits, hashes = run(arguments, words, [str(rank), at], where)
                if words is fewer:
                    # The ends of two attempts, in their order.
                    begins = sorted(waits[0])[-2:]
                    narrow, wide = (wait for wait in waits[0] if wait in begins)
                    seconds[kind].append(narrow)
                    seconds["has all again"].append(wide)
                else:
                    seconds[kind].append(max(map(max, waits)))
                other += hashes != undisturbed
    figures = [Figure(f"{kind}: pause", pauses, "s") for kind, pauses in seconds.items()]
    report([*figures, Figure("jobs that end with another model", [other])], arguments.json)


def _folder(place: str, name: str) -> Path:
    folder = Path(place, name)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    train() if "PADDLE_TRAINER_ID" in os.environ else main()
