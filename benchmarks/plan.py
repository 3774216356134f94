"""Plans AlexNet, ResNet-50 and the GPT example from a profile, and runs what was planned.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--ranks 2] [--case gpt] [--rounds 5]

On each number of ranks the model is profiled under a plain cut, planned, built anew by the plan and
trained, the optimizer's step left out. As machines are faster at one minute than at another, model
and plan take turns: in each round the model is profiled again, which gives what the same plan is to
cost now, and some batches of the plan are run, the first of them cold and not counted. Ratios are
those of the rounds, measured / predicted. Ranks that share a processor wait for it, which no plan
predicts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from dygraph_alexnet import AlexNetPipe
from gpt import gpt
from resnet import ResNet

import fleetpipe
from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import PipelineLayer
from fleetpipe.profiling import recosted

MICRO_BATCHES, COLD = 8, 2

#: ``build(plan)`` makes a pipeline; None means a plain cut.
Build = Callable[[Any], Any]


def images(rows: int, channels: int, size: int) -> list[Any]:
    """[images, labels] of a batch."""
    numbers = np.random.default_rng(0)
    shape = (MICRO_BATCHES * rows, channels, size, size)
    labels = numbers.integers(0, 10, (MICRO_BATCHES * rows, 1))
    return [paddle.to_tensor(numbers.standard_normal(shape, "float32")), paddle.to_tensor(labels)]


def of_list(first: Callable[[], Any]) -> Build:
    """Builds a list of layers, that of a ``PipelineLayer``."""

    def build(plan: Any) -> Any:
        plain = first()
        if plan is None:
            return plain
        topology = fleet.get_hybrid_communicate_group().topology()
        return PipelineLayer(plain.layers, topology=topology, loss_fn=plain.loss_fn(), plan=plan)

    return build


def topology() -> Any:
    """Returns the job's topology."""
    return fleet.get_hybrid_communicate_group().topology()


def alexnet(rows: int) -> tuple[Build, list[Any]]:
    """AlexNet for 28 x 28 digits."""
    return of_list(lambda: AlexNetPipe(topology=topology())), images(rows, 1, 28)


def resnet(rows: int) -> tuple[Build, list[Any]]:
    """ResNet-50 of a quarter of the width, captured."""
    data = images(rows, 3, 32)

    def build(plan: Any) -> Any:
        return fleetpipe.pipeline(
            ResNet(50, width=16),
            (data[0][:rows],),
            loss_fn=nn.CrossEntropyLoss(),
            split_spec="auto" if plan is None else plan,
            verify=False,
        )

    return build, data


def gpt_example(rows: int) -> tuple[Build, list[Any]]:
    """The example's GPT, a little larger."""
    shape = argparse.Namespace(width=128, heads=4, dropout=0.0, length=128, blocks=8)
    tokens = np.random.default_rng(0).integers(0, 256, (MICRO_BATCHES * rows, shape.length + 1))
    data = [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]
    return of_list(lambda: gpt(shape, 256, topology=topology())), data


CASES = {"alexnet": (alexnet, 16), "resnet50": (resnet, 4), "gpt": (gpt_example, 4)}


def measure(name: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Returns what a rank measured. Collective."""
    case, rows = CASES[name]
    started(ranks, MICRO_BATCHES, rows)
    build, data = case(rows)
    plain = fleet.distributed_model(build(None))
    for _ in range(COLD):
        plain.forward_backward_pipeline(data)
    plan = fleetpipe.plan(plain.profile(data), ranks, MICRO_BATCHES, optimizer_copies=0)
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    model = fleet.distributed_model(build(plan))
    predicted: list[float] = []
    seconds: list[list[float]] = []
    for _ in range(rounds):
        profile = plain.profile(data)
        gc.collect()
        predicted.append(recosted(plan, profile).predicted.time)
        batches: list[float] = []
        for step in range(COLD + steps):
            if step == COLD:
                core.host_memory_stat_reset_peak_value("Allocated", 0)
            start = time.perf_counter()
            model.forward_backward_pipeline(data)
            batches.append(time.perf_counter() - start)
        seconds.append(batches[COLD:])
    peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    rank = fleet.get_hybrid_communicate_group().get_stage_id()
    fleet.shutdown()
    return {
        "schedule": f"{plan.schedule.name}, v = {plan.chunks}",
        "predicted": predicted,
        "seconds": seconds,
        "peak": peak / plan.predicted.peak_bytes[rank],
    }


def figures_of(name: str, ranks: int, results: list[dict[str, Any]]) -> list[Figure]:
    """Returns the figures of a case. A batch takes as long as its slowest rank."""
    title, first = f"{name}, {ranks} ranks", results[0]
    rounds = [
        [max(batch) for batch in zip(*of_ranks)]
        for of_ranks in zip(*(one["seconds"] for one in results))
    ]
    ratios = [statistics.median(one) / time for one, time in zip(rounds, first["predicted"])]
    predicted = [1e3 * one for one in first["predicted"]]
    return [
        Figure(f"{title}, {first['schedule']}: predicted", predicted, "ms"),
        Figure(f"{title}: clock", [1e3 * batch for one in rounds for batch in one], "ms"),
        Figure(f"{title}: clock / predicted", ratios),
        Figure(f"{title}: peak bytes / predicted, by rank", [one["peak"] for one in results]),
    ]


def main() -> None:
    """Launches the ranks of each case, and shows what they measured."""
    options = parser(__doc__)
    options.add_argument("--ranks", default="2", help="numbers of ranks, as 2,4 (default: 2)")
    options.add_argument("--case", choices=CASES, help="one of the models alone")
    options.add_argument("--rounds", type=int, default=5, help="rounds of a profile and batches")
    options.add_argument("--steps", type=int, default=8, help="batches measured in a round")
    arguments = options.parse_args()
    if is_rank():
        sizes = int(arguments.ranks), arguments.rounds, arguments.steps
        answer(measure(arguments.case, *sizes))
        return
    figures = []
    for ranks in map(int, arguments.ranks.split(",")):
        for name in [arguments.case] if arguments.case else CASES:
            results = on_ranks(ranks, "--ranks", str(ranks), "--case", name)
            figures += figures_of(name, ranks, results)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
