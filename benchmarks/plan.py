"""Plans AlexNet, ResNet-50 and the GPT example from a profile, and runs what was planned.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--ranks 2,4] [--case gpt] [--rounds 5]

On each number of ranks the model is profiled under a plain cut, planned, built anew by the plan and
trained, the optimizer's step left out. As machines are faster at one minute than at another, model
and plan take turns: in each round the model is profiled again, which gives what the same plan is to
cost now, and some batches of the plan are run, the first of them cold and not counted. Ratios are
those of the rounds, measured / predicted.

The time of a batch is measured in two ways. By the clock, which says nothing where ranks share a
processor. And played: the processor time of every action, send, receive and release of a batch is
put through the order in which the ranks did them, each beginning when its rank is free and its
message is there, as if every rank had a processor. On as many processors as ranks the two can be
compared.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from dygraph_alexnet import AlexNetPipe
from gpt import gpt
from resnet import ResNet

import fleetpipe
from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report
from fleetpipe import fleet
from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.fleet.meta_parallel import PipelineLayer
from fleetpipe.profiling import recosted
from fleetpipe.schedules import Op, Recv, Reduce, Send, Step

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


def begin(ranks: int, rows: int) -> None:
    """Begins a job."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": ranks}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": rows}
    fleet.init(is_collective=True, strategy=strategy)


class Processor:
    """An observer of the engine: the processor time of what a rank does in a batch, in order.

    Attributes:
        done: What it did, and the seconds that this took.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Op, float]] = []

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, (Reduce, Step)):
            return instruction
        begun: float | None = None

        def timed() -> Blocked | None:
            nonlocal begun
            if begun is None:
                begun = time.thread_time()
            blocked = instruction()
            if blocked is None:
                self.done.append((op, time.thread_time() - begun))
                begun = None
            return blocked

        return timed


def played(ranks: Sequence[Sequence[tuple[Op, float]]], latency: float) -> float:
    """Returns how long a batch takes whose ranks have a processor each.

    Args:
        ranks: What each rank does, in order, and the seconds that it is busy with it.
        latency: Seconds from the end of a send to the moment at which it can be received.
    """
    now, at = [0.0] * len(ranks), [0] * len(ranks)
    sent: dict[str, float] = {}
    while any(position < len(row) for position, row in zip(at, ranks)):
        for rank, row in enumerate(ranks):
            while at[rank] < len(row):
                op, seconds = row[at[rank]]
                message = str(op)[1:]
                if isinstance(op, Recv):
                    if message not in sent:
                        break
                    now[rank] = max(now[rank], sent[message] + latency)
                now[rank] += seconds
                if isinstance(op, Send):
                    sent[message] = now[rank]
                at[rank] += 1
    return max(now)


class Round(NamedTuple):
    """What one round found on a rank.

    Attributes:
        predicted: Seconds of a batch.
        busy: Predicted seconds that each rank is busy.
        latency: Seconds that a message is on its way.
        seconds: Of each batch, by the clock.
        done: Of each batch what the rank did, and its processor time.
    """

    predicted: float
    busy: tuple[float, ...]
    latency: float
    seconds: list[float]
    done: list[list[tuple[Op, float]]]


def measure(name: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Returns what all ranks measured. Collective."""
    case, rows = CASES[name]
    begin(ranks, rows)
    build, data = case(rows)
    plain = fleet.distributed_model(build(None))
    for _ in range(COLD):
        plain.forward_backward_pipeline(data)
    plan = fleetpipe.plan(plain.profile(data), ranks, MICRO_BATCHES, optimizer_copies=0)
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    model = fleet.distributed_model(build(plan))
    processor = Processor()
    model.observe(processor)
    measured = []
    for _ in range(rounds):
        profile = plain.profile(data)
        gc.collect()
        now = recosted(plan, profile).predicted
        one = Round(now.time, now.busy, profile.link(0).latency, [], [])
        for step in range(COLD + steps):
            if step == COLD:
                core.host_memory_stat_reset_peak_value("Allocated", 0)
            processor.done = []
            start = time.perf_counter()
            model.forward_backward_pipeline(data)
            if step >= COLD:
                one.seconds.append(time.perf_counter() - start)
                one.done.append(processor.done)
        measured.append(one)
    peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    everyone: list[Any] = []
    paddle.distributed.all_gather_object(everyone, (measured, peak))
    fleet.shutdown()
    of_ranks = [list(each) for each in zip(*(rounds for rounds, _ in everyone))]
    return {
        "schedule": f"{plan.schedule.name}, v = {plan.chunks}",
        "rounds": [summary(each) for each in of_ranks],
        "predicted bytes": plan.predicted.peak_bytes,
        "bytes": [size for _, size in everyone],
    }


def summary(ranks: Sequence[Round]) -> dict[str, Any]:
    """Returns the figures of a round of all ranks."""
    first = ranks[0]
    batches = list(zip(*(each.done for each in ranks)))
    return {
        "predicted": first.predicted,
        "predicted busy": first.busy,
        # A batch takes as long as its slowest rank.
        "clock": [max(seconds) for seconds in zip(*(each.seconds for each in ranks))],
        "played": [played(batch, first.latency) for batch in batches],
        "busy": [
            statistics.median(sum(seconds for _, seconds in done) for done in each.done)
            for each in ranks
        ],
    }


def figures_of(name: str, ranks: int, result: dict[str, Any]) -> list[Figure]:
    """Returns the figures of a case; the clock says nothing where ranks share a processor."""
    rounds = result["rounds"]
    title = f"{name}, {ranks} ranks"
    plan = f"{title}, {result['schedule']}: predicted"
    figures = [Figure(plan, [1e3 * one["predicted"] for one in rounds], "ms")]
    for way in ("clock", "played")[ranks > len(os.sched_getaffinity(0)) :]:
        ratios = [statistics.median(one[way]) / one["predicted"] for one in rounds]
        milliseconds = [1e3 * batch for one in rounds for batch in one[way]]
        figures.append(Figure(f"{title}: {way}", milliseconds, "ms"))
        figures.append(Figure(f"{title}: {way} / predicted", ratios))
    pairs = [pair for one in rounds for pair in zip(one["busy"], one["predicted busy"])]
    peaks = [size / planned for size, planned in zip(result["bytes"], result["predicted bytes"])]
    figures.append(
        Figure(f"{title}: busy / predicted, by rank", [used / busy for used, busy in pairs])
    )
    figures.append(Figure(f"{title}: peak bytes / predicted, by rank", peaks))
    return figures


def main() -> None:
    """Launches the ranks of each case, and shows what they measured."""
    options = parser(__doc__)
    options.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
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
            figures += figures_of(name, ranks, results[0])
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
