"""Trains for ten thousand steps, and asks whether anything grows.

    python -m benchmarks.long.soak [--steps 10000] [--restarts 9] [--json FILE]

A small GPT trains on two ranks under ``fleetpipe launch``: it saves every hundredth step, and its
board is scraped twice a second. First nobody disturbs it; then, in another job, a rank is killed
behind every tenth of the steps. Shown are what the ranks of the first job hold and compute with in
its first and in its last tenth, the same of the processes that launch both jobs, and whether both
end with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, parser, report, started

#: Steps between two samples of a process, and between two saves.
SAMPLED, SAVED = 50, 100
#: Steps that are done again after a kill.
BEHIND_A_SAVE = 30
BATCHES, MICRO_BATCHES, ROWS, LENGTH, HIDDEN = 16, 4, 2, 16, 32

Sample = dict[str, float]


def resources(process: int | str = "self") -> Sample:
    """Returns what a process holds: MiB of memory and of shared memory, descriptors, threads."""
    status = Path(f"/proc/{process}/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "memory": int(words["VmRSS"].split()[0]) / 1024,
        "shared memory": int(words["RssShmem"].split()[0]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(words["Threads"]),
    }


def train(steps: int, restarts: int, folder: Path) -> None:
    """Is one rank: trains, and is killed in its turn."""
    import numpy as np
    import paddle
    from paddle import nn

    import fleetpipe
    from benchmarks.workers.gpt import Block
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
    from fleetpipe.job import attempt_files

    rank, attempt = int(os.environ["PADDLE_TRAINER_ID"]), attempt_files.number()
    every = steps // (restarts + 1)
    killed = attempt * every + BEHIND_A_SAVE if attempt <= restarts else steps
    started(2, MICRO_BATCHES, ROWS)
    paddle.seed(1)
    blocks = [LayerDesc(Block, HIDDEN, 2, LENGTH), LayerDesc(nn.Dropout, 0.1)] * 4
    pipe = PipelineLayer(blocks, num_stages=2, loss_fn=nn.MSELoss())
    model = fleet.distributed_model(pipe)
    rate = paddle.optimizer.lr.ExponentialDecay(0.001, 0.9999)
    clip = nn.ClipGradByGlobalNorm(1.0)
    adam = paddle.optimizer.AdamW(rate, parameters=pipe.parameters(), grad_clip=clip)
    optimizer = fleet.distributed_optimizer(adam)
    manager = fleetpipe.CheckpointManager(
        folder / "checkpoints", save_interval=SAVED, max_to_keep=2
    )
    run = fleetpipe.resume(model, optimizer, lr_scheduler=rate, manager=manager)
    numbers = np.random.default_rng(0)
    shape = (BATCHES, 2, MICRO_BATCHES * ROWS, LENGTH, HIDDEN)
    # Made once: each paddle.to_tensor of an array leaves some hundred bytes behind, in Paddle.
    batches = [[*map(paddle.to_tensor, pair)] for pair in numbers.standard_normal(shape, "float32")]
    samples: list[Sample] = []
    begun = time.process_time()
    for step in run.steps(steps):
        if step == killed and rank == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model.train_batch(batches[step % BATCHES], optimizer, rate)
        if (step + 1) % SAMPLED == 0:
            now = time.process_time()
            samples.append(
                {**resources(), "processor time of a step": 1e3 * (now - begun) / SAMPLED}
            )
            begun = now
    bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in pipe.parameters()))
    answer = {"bits": bits.hexdigest(), "samples": samples}
    (folder / f"rank-{rank}").write_text(json.dumps(answer))
    fleet.shutdown()


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def look_on(process: int, port: int, ended: threading.Event, samples: list[Sample]) -> None:
    """Scrapes the board twice a second, and samples the process that launches the job."""
    while not ended.wait(0.5):
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                page.read()
            samples.append(resources(process))


def job(options: argparse.Namespace, restarts: int, folder: Path) -> tuple[Any, list[Sample]]:
    """Runs a job; returns what its ranks say, and samples of its launcher."""
    folder.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "fleetpipe", "launch", "--max-restart", str(restarts)]
    command += ["--nproc", "2", "--serve", str(port), "--log-dir", str(folder / "log"), __file__]
    command += ["--steps", str(options.steps), "--rank", str(restarts), str(folder)]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    samples: list[Sample] = []
    ended = threading.Event()
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        watcher = threading.Thread(target=look_on, args=(launcher.pid, port, ended, samples))
        watcher.start()
        code = launcher.wait()
        ended.set()
        watcher.join()
    if code:
        raise SystemExit(f"the job ended with {code}:\n{(folder / 'output').read_text()[-4000:]}")
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(2)], samples


def ends(name: str, samples: list[Sample], unit: str, kind: str) -> list[Figure]:
    """Returns the first and the last tenth of one kind of samples."""
    values = [sample[kind] for sample in samples]
    tenth = max(1, len(values) // 10)
    parts = {"first": values[:tenth], "last": values[-tenth:]}
    return [
        Figure(f"{name}: {kind}, {part} tenth", part_of, unit) for part, part_of in parts.items()
    ]


def main() -> None:
    """Runs both jobs and reports."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=10_000)
    options.add_argument("--restarts", type=int, default=9)
    options.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        train(chosen.steps, int(chosen.rank[0]), Path(chosen.rank[1]))
        return
    with tempfile.TemporaryDirectory() as place:
        quiet, launcher = job(chosen, 0, Path(place, "undisturbed"))
        killed, supervisor = job(chosen, chosen.restarts, Path(place, "disturbed"))
    figures = []
    for rank, one in enumerate(quiet):
        for kind, unit in {
            "processor time of a step": "ms",
            "memory": "MiB",
            "shared memory": "MiB",
        }.items():
            figures += ends(f"rank {rank}", one["samples"], unit, kind)
        for kind in ("descriptors", "threads"):
            figures += ends(f"rank {rank}", one["samples"], "", kind)
    for name, samples in {"launcher": launcher, "launcher of restarts": supervisor}.items():
        for kind, unit in {"memory": "MiB", "descriptors": "", "threads": ""}.items():
            figures += ends(name, samples, unit, kind)
    other = sum(one["bits"] != two["bits"] for one, two in zip(quiet, killed))
    report([*figures, Figure("ranks that end with other parameters", [other])], chosen.json)


if __name__ == "__main__":
    main()
