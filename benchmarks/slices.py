"""Measures what 1F1B and Seq1F1B hold on real ranks: peak resident bytes of each process.

python benchmarks/slices.py                                2 ranks, sequences of 1024 in 1, 2, 4
python benchmarks/slices.py --ranks 4 --length 2048 --slices 1,8

Counted is what training adds to the peak of a process that has built the model and trained on
one short batch before. Memory counts are not disturbed by what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--slices", default="1,2,4", help="1 is the schedule 1F1B")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.report is not None:
        work(args)
        return
    for slices in args.slices.split(","):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "paddle.distributed.launch"]
            command += ["--nproc_per_node", f"{args.ranks}", "--log_dir", f"{folder}/log", __file__]
            for name, value in {**vars(args), "slices": slices, "report": folder}.items():
                command += [f"--{name.replace('_', '-')}", f"{value}"]
            subprocess.run(command, check=True, capture_output=True, timeout=900)
            found = [
                json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(args.ranks)
            ]
        mebibytes = " ".join(f"{one['bytes'] / 2**20:7.1f}" for one in found)
        print(f"slices {slices}: peak MiB by rank {mebibytes}, loss {found[0]['loss']:.6f}")


def work(args: argparse.Namespace) -> None:
    """Trains as one rank, and writes what that added to its peak."""
    sys.path.insert(0, str(ROOT / "examples"))
    import numpy as np
    import paddle
    from gpt import gpt

    from fleetpipe import fleet

    args.dropout, slices = 0.0, int(args.slices)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": args.ranks}
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches,
        "micro_batch_size": 1,
        "schedule_mode": "Seq1F1B" if slices > 1 else "1F1B",
    }
    if slices > 1:
        strategy.fleetpipe_configs = {"slices": slices}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(1)
    topology = fleet.get_hybrid_communicate_group().topology()
    model = fleet.distributed_model(gpt(args, 256, topology=topology))
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(sgd)

    def train(length: int) -> float:
        tokens = np.random.default_rng(0).integers(0, 256, (args.micro_batches, length + 1))
        data = [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]
        return float(model.train_batch(data, optimizer))

    train(SHORT)
    before = peak()
    loss = train(args.length)
    found = {"bytes": peak() - before, "loss": loss}
    (args.report / f"{os.environ['PADDLE_TRAINER_ID']}.json").write_text(json.dumps(found))
    fleet.shutdown()


def peak() -> int:
    """Returns the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
