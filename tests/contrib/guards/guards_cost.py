"""What guards cost: ``fleetpipe run --nproc 2 tests/contrib/guards/guards_cost.py [STEPS]``.

Four models of one job, without guards and with guards of every step, every 10th and every 100th,
take steps in turn: along pp with two ranks, or along dp with ``DEGREES=dp``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

WIDTH, ROWS, BATCHES = 256, 32, 8
GUARDS = (0, 1, 10, 100)


def main(steps: int) -> None:
    """Prints the median of each model's steps, in milliseconds, and of the verified ones."""
    strategy = fleet.DistributedStrategy()
    axis = os.environ.get("DEGREES", "pp")
    stages = 2 if axis == "pp" else 1
    strategy.hybrid_configs = {f"{axis}_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": BATCHES, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    pairs = []
    for every in GUARDS:
        fleet.fleet._user_defined_strategy.fleetpipe_configs = {"guards": every}
        block = [
            LayerDesc(nn.Linear, WIDTH, 4 * WIDTH),
            nn.functional.relu,
            LayerDesc(nn.Linear, 4 * WIDTH, WIDTH),
            LayerDesc(nn.LayerNorm, WIDTH),
        ]
        model = fleet.distributed_model(
            PipelineLayer(block * 4, num_stages=stages, loss_fn=nn.MSELoss())
        )
        clip = nn.ClipGradByGlobalNorm(1.0)
        made = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), grad_clip=clip)
        pairs.append((model, fleet.distributed_optimizer(made)))
    data = [paddle.rand([BATCHES * ROWS, WIDTH]), paddle.rand([BATCHES * ROWS, WIDTH])]
    times: list[list[float]] = [[] for _ in GUARDS]
    for step in range(steps):
        for number in range(len(GUARDS)):
            turn = (number + step) % len(GUARDS)
            begin = time.perf_counter()
            pairs[turn][0].train_batch(data, pairs[turn][1])
            times[turn].append(1e3 * (time.perf_counter() - begin))
    if fleet.worker_index() == 0:
        for every, of_model in zip(GUARDS, times):
            verified = [t for n, t in enumerate(of_model) if n and every and n % every == 0]
            line = f"guards {every:3d}: step {statistics.median(of_model[5:]):7.2f} ms"
            line += f", mean {statistics.mean(of_model[5:]):7.2f}"
            print(line + (f", verified {statistics.median(verified):7.2f}" if verified else ""))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
