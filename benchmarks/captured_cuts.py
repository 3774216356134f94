"""Trains ResNet-50 cut "auto", uniformly and balanced, side by side on real ranks.

    OMP_NUM_THREADS=1 python benchmarks/captured_cuts.py [--ranks 2] [--repeats 9] [--size 64]

All three live in one job and train in turn, so that the machine's load hits all alike. "uniform"
has as many nodes in each stage, "balanced" as few parameters as can be in the fullest: what
frameworks cut by that do not measure. For each: the processor time of the slowest rank in a step,
of all ranks in the mean, and the step by the clock; and of "auto" the slowest stage as predicted,
beside what no cut can beat. Processor time is that of a rank's own work whatever else the machine
does; with more ranks than cores the clock tells little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.vision.models import resnet50

import fleetpipe
from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started
from fleetpipe import fleet
from fleetpipe.capture.explain import Explanation
from fleetpipe.job.job import pipeline_group
from fleetpipe.partition import fastest

CUTS = ("auto", "uniform", "balanced")
MICRO_BATCHES, ROWS, CLASSES = 4, 4, 10


def spec_of(found: Explanation, cut: str, stages: int) -> Any:
    """Returns the ``split_spec`` of a cut."""
    if cut == "auto":
        return cut

    def nodes(stage: int, start: int, end: int) -> float:
        return end - start

    def parameters(stage: int, start: int, end: int) -> float:
        return sum(found.parameters[start:end])

    # A user names a sublayer, not one of its later calls.
    places = [number for number, border in found.places.items() if not border.call]
    cost: Callable[[int, int, int], float] = nodes if cut == "uniform" else parameters
    starts = fastest(places, len(found.trace.nodes), stages, cost).boundaries[1:-1]
    return {found.places[start].path: found.places[start].point for start in starts}


class Contender:
    """A cut, with a model and an optimizer of its own."""

    def __init__(self, cut: str, batch: Sequence[Any], stages: int) -> None:
        self.name = cut
        self._batch = list(batch)
        paddle.seed(0)
        model, example = resnet50(num_classes=CLASSES), batch[0][:ROWS]
        spec = spec_of(fleetpipe.explain(model, example), cut, stages)
        self.pipe = fleetpipe.pipeline(model, example, nn.CrossEntropyLoss(), spec, verify=False)
        self._model = fleet.distributed_model(self.pipe)
        self._optimizer = fleet.distributed_optimizer(
            paddle.optimizer.Momentum(1e-3, parameters=self.pipe.parameters())
        )
        self.steps: list[tuple[float, float]] = []

    def step(self) -> None:
        """Trains one batch and notes the seconds of the clock and of this rank's processor."""
        begin, worked = time.perf_counter(), time.process_time()
        self._model.train_batch(self._batch, self._optimizer)
        self.steps.append((time.perf_counter() - begin, time.process_time() - worked))


def measure(repeats: int, size: int, ranks: int) -> list[Any]:
    """Returns the figures of all cuts. Collective."""
    started(ranks, MICRO_BATCHES, ROWS)
    rows = MICRO_BATCHES * ROWS
    paddle.seed(1)
    batch = [paddle.randn([rows, 3, size, size]), paddle.randint(0, CLASSES, [rows, 1])]
    contenders = [Contender(cut, batch, ranks) for cut in CUTS]
    for _ in range(repeats + 1):
        for contender in contenders:
            contender.step()
    figures: list[Any] = []
    slowest: dict[str, list[float]] = {}
    for contender in contenders:
        # By rank, then by step, the first of which warms up.
        all_steps = pipeline_group().all_gather(contender.steps)
        steps = [list(zip(*ranks)) for ranks in zip(*(one[1:] for one in all_steps))]
        name, choice = contender.name, contender.pipe.choice
        slowest[name] = [max(worked) for _, worked in steps]
        means = [statistics.mean(worked) for _, worked in steps]
        pairs = [worked / auto for auto, worked in zip(slowest["auto"], slowest[name])]
        figures += [
            (f"{name}: processor of the slowest rank", slowest[name], "s"),
            (f"{name}: processor, mean of the ranks", means, "s"),
            (f"{name}: a step", [max(clock) for clock, _ in steps], "s"),
            (f"{name}: slowest rank, to that of auto", pairs, ""),
        ]
        if choice:
            predicted = (
                ("slowest stage, predicted", choice.bottleneck),
                ("of any cut", choice.bound),
            )
            figures += [(f"{name}: {what}", [one * MICRO_BATCHES], "s") for what, one in predicted]
    fleet.shutdown()
    return figures


def main() -> None:
    """Launches the ranks of this file and shows what they measured."""
    options = parser(__doc__, repeats=9)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--size", type=int, default=64, help="height and width of the images")
    arguments = options.parse_args()
    if is_rank():
        answer(measure(arguments.repeats, arguments.size, arguments.ranks))
        return
    report([Figure(*row) for row in on_ranks(arguments.ranks)[0]], arguments.json)


if __name__ == "__main__":
    main()
