"""Measures what sums by a tree cost: steps with them beside steps without, in turn.

python benchmarks/sums.py                        GPT of hidden 256 and 768, 8 and 16 micro-batches
python benchmarks/sums.py --schedules ZBH1       with a split backward

One process plays two ranks. The times are of its processor, so that other work disturbs them less.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks.figures import Figure, parser, report

SUMS = ("running", "tree")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--hidden", default="256,768")
    options.add_argument("--micro-batches", default="8,16")
    options.add_argument("--schedules", default="1F1B")
    options.add_argument("--pairs", type=int, default=3)
    arguments = options.parse_args()
    figures = []
    for hidden in arguments.hidden.split(","):
        for count in map(int, arguments.micro_batches.split(",")):
            for schedule in arguments.schedules.split(","):
                ratios = []
                for _ in range(arguments.pairs):
                    without, by_tree = (seconds(hidden, count, schedule, sums) for sums in SUMS)
                    ratios.append(by_tree / without)
                title = f"hidden {hidden}, {count} micro-batches, {schedule}"
                figures.append(Figure(f"{title}: step with trees, of one without", ratios))
    report(figures, arguments.json)


def seconds(hidden: str, micro_batches: int, schedule: str, sums: str, steps: int = 5) -> float:
    """Returns the median time of the processor for a step, after two to warm up."""
    import paddle

    from benchmarks.workers.gpt import CASES
    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import PipelineLayer

    case = replace(CASES[f"gpt {hidden}"], micro_batches=micro_batches, blocks=4)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": case.ranks}
    strategy.pipeline_configs = {
        "accumulate_steps": micro_batches,
        "micro_batch_size": case.rows,
        "schedule_mode": schedule,
    }
    strategy.fleetpipe_configs = {"sums": sums}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        layers = PipelineLayer(
            case.layers(), num_stages=case.ranks, loss_fn=paddle.nn.functional.mse_loss
        )
        model: Any = fleet.distributed_model(layers)
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=layers.parameters())
        optimizer = fleet.distributed_optimizer(optimizer)
        batch, times = case.batch(), []
        for _ in range(steps + 2):
            begun = time.process_time()
            model.train_batch(batch, optimizer)
            times.append(time.process_time() - begun)
        return statistics.median(times[2:])
    finally:
        fleet.shutdown()


if __name__ == "__main__":
    main()
