"""Measures the start of a job on two ranks: ``fleet.init`` to the end of the first step.

    python benchmarks/start.py [--repeats 5]

Paddle's own ``fleet.init``, which makes the same groups and runs no step, is started in turn with
fleetpipe's, A B A B ... Both begin at an agreed moment, when all ranks have imported what they
need. Times are those of the slower rank.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report

#: Seconds in which all ranks have been started and have imported Paddle.
IMPORT_SECONDS = 15.0
RANKS = 2


def play(kind: str, begin: float) -> None:
    """Is one rank: starts the job at the moment ``begin`` and answers how long it took."""
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
    answer({"fleet.init": started, "first step": time.time() - begin})


def run(kind: str) -> dict[str, float]:
    """Returns the seconds to the end of ``fleet.init`` and of a step, of the slower rank."""
    answers = on_ranks(RANKS, "--rank", kind, str(time.time() + IMPORT_SECONDS))
    return {name: max(one[name] for one in answers) for name in answers[0]}


def main() -> None:
    options = parser(__doc__, repeats=5)
    options.add_argument("--rank", nargs=2, metavar=("KIND", "BEGIN"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if is_rank():
        play(arguments.rank[0], float(arguments.rank[1]))
        return
    runs = [{kind: run(kind) for kind in ("stock", "fleetpipe")} for _ in range(arguments.repeats)]
    more = [one["fleetpipe"]["first step"] - one["stock"]["fleet.init"] for one in runs]
    figures = [
        Figure(f"{kind}: {name}", [one[kind][name] for one in runs], "s")
        for kind, name in (
            ("stock", "fleet.init"),
            ("fleetpipe", "fleet.init"),
            ("fleetpipe", "first step"),
        )
    ]
    figures.append(Figure("first step beyond Paddle's own start", more, "s"))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
