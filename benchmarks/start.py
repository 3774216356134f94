"""Measures the start of a job on two ranks: ``fleet.init`` to the end of the first step.

    python benchmarks/start.py [--repeats 5]

Paddle's own ``fleet.init``, which makes the same groups and runs no step, is started in turn with
fleetpipe's, A B A B ... Both begin at an agreed moment, when all ranks have imported what they
need. Times are those of the slower rank: medians with the range of all repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Seconds in which all ranks have been started and have imported Paddle.
IMPORT_SECONDS = 15.0
LIMIT_SECONDS = 120.0
RANKS = 2


def play(kind: str, begin: float) -> None:
    """Is one rank: starts the job at the moment ``begin`` and prints how long it took."""
    import paddle
    from paddle import nn

    if kind == "stock":
        from paddle.distributed import fleet
    else:
        from fleetpipe import fleet
        from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": RANKS}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 8}
    left = begin - time.time()
    if left < 0:
        sys.exit(f"the imports took {-left:.1f} s longer than IMPORT_SECONDS allows")
    time.sleep(left)
    fleet.init(is_collective=True, strategy=strategy)
    started = time.time() - begin
    if kind == "fleetpipe":
        layers = [LayerDesc(nn.Linear, 8, 32), nn.functional.relu, LayerDesc(nn.Linear, 32, 2)]
        topology = fleet.get_hybrid_communicate_group().topology()
        pipe = PipelineLayer(layers, topology=topology, loss_fn=nn.CrossEntropyLoss())
        sgd = paddle.optimizer.SGD(0.5, parameters=pipe.parameters())
        model, optimizer = fleet.distributed_model(pipe), fleet.distributed_optimizer(sgd)
        batch = [paddle.ones([32, 8]), paddle.zeros([32, 1], "int64")]
        model.train_batch(batch, optimizer)
    print(f"measured {started} {time.time() - begin}", flush=True)


def run(kind: str) -> tuple[float, float]:
    """Returns the seconds to the end of ``fleet.init`` and of the first step, of the slower rank.

    Raises:
        RuntimeError: A rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(RANKS)]
        begin = time.time() + IMPORT_SECONDS
        words = [*launcher, "--log_dir", folder, __file__, "--rank", kind, str(begin)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words]
        # What went wrong stands in the logs, which say more than the launcher's exit code.
        subprocess.run(
            command, env=environment, capture_output=True, timeout=LIMIT_SECONDS, check=False
        )
        logs = [Path(folder, f"workerlog.{rank}").read_text() for rank in range(RANKS)]
    told = [line.split()[1:] for log in logs for line in log.splitlines() if "measured " in line]
    if len(told) < RANKS:
        raise RuntimeError("a rank failed:\n" + "\n".join(logs))
    started, stepped = zip(*(map(float, seconds) for seconds in told))
    return max(started), max(stepped)


def main() -> None:
    """Prints one line for each kind."""
    parser = argparse.ArgumentParser(description="the start of a job on two ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "BEGIN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        play(options.rank[0], float(options.rank[1]))
        return
    runs = [{kind: run(kind) for kind in ("stock", "fleetpipe")} for _ in range(options.repeats)]
    for kind in ("stock", "fleetpipe"):
        for name, at in (("fleet.init", 0), ("first step", 1)):
            if kind == "stock" and at:
                continue
            took = [found[kind][at] for found in runs]
            spread = f"{min(took):.2f} to {max(took):.2f} s"
            print(f"{kind:10}{name:11} {statistics.median(took):.2f} s  ({spread})")
    more = [found["fleetpipe"][1] - found["stock"][0] for found in runs]
    print(f"first step beyond Paddle's own start: {statistics.median(more):.2f} s")


if __name__ == "__main__":
    main()
