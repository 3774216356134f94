"""What a split backward costs beside a whole one, layer by layer: I + W over B.

    OMP_NUM_THREADS=1 python benchmarks/layers/split_backward.py [--repeats 15]

For each stack of layers two stages live in this process, of which one splits its backward. They run
forward and backward in turn, two micro-batches each, of which the second is measured: the gradients
of the first are there. Times are processor time, which other processes change least; ratios are
those of the pairs. F/F is what the split costs in the forward. Bytes
are what is alive after I beside what is alive after F of a whole backward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import paddle
from paddle import nn

import fleetpipe.fleet  # noqa: F401 (chooses MKL's code as a training does)
from benchmarks.figures import Figure, parser, report
from benchmarks.workers import gpt
from fleetpipe import schedules
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.dygraph_stage import Batch, DygraphStage
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.paddle_api.device import allocated_bytes

HIDDEN, ROWS, LENGTH, WORDS = (256, 768, 1536), (128, 512), 128, 2000


class Side:
    """A stage with a schedule of its own."""

    def __init__(self, make: Callable[[], list[Any]], schedule: str) -> None:
        self.layers = make()
        split = SplitBackward(
            schedules.build(schedule, ranks=1, micro_batches=2),
            lambda stage: dict(enumerate(self.layers)),
        )
        self.split = schedule == "ZBH1"
        self.stage = DygraphStage(lambda stage: self._run, schedules.Placement("loop", 1), split)
        self.kept = 0

    def _run(self, value: Any, micro_batch: int) -> Any:
        for layer in self.layers:
            value = layer(value)
        return value

    def times(self, x: Any, weights: Any) -> list[float]:
        """Returns seconds of F and B, or of F, I and W, of the second of two micro-batches."""
        losses = Losses([lambda output, label: (output * label).sum()], [Fraction(1)] * 2)
        self.stage.begin(Batch(MicroBatches([x, x], [weights, weights]), losses))
        self._micro_batch(0)
        marks = self._micro_batch(1)
        self.stage.end()
        return [after - earlier for earlier, after in itertools.pairwise(marks)]

    def _micro_batch(self, number: int) -> list[float]:
        """Returns when each action began, and when the last ended."""
        stage, before, marks = self.stage, allocated_bytes(), [time.process_time()]
        stage.forward(0, number, {})
        marks.append(time.process_time())
        if self.split:
            stage.input_grad(0, number, {})
            marks.append(time.process_time())
            self.kept = allocated_bytes() - before
            stage.weight_grad(0, number)
        else:
            self.kept = allocated_bytes() - before
            stage.backward(0, number, {})
        marks.append(time.process_time())
        stage.release(0, number)
        return marks


def measured(make: Callable[[], list[Any]], x: Any, weights: Any, repeats: int) -> list[Figure]:
    """Runs both sides in turn; milliseconds, ratios and bytes."""
    whole, split = (Side(make, name) for name in ("1F1B", "ZBH1"))
    pairs = [(whole.times(x, weights), split.times(x, weights)) for _ in range(repeats + 2)][2:]
    names = ("F", "B"), ("F split", "I", "W")
    figures = [
        Figure(name, [pair[side][number] * 1e3 for pair in pairs], "ms")
        for side in range(2)
        for number, name in enumerate(names[side])
    ]
    return [
        *figures,
        Figure("F/F", [split[0] / whole[0] for whole, split in pairs]),
        Figure("I+W/B", [(split[1] + split[2]) / whole[1] for whole, split in pairs]),
        Figure("kept", [split.kept / max(whole.kept, 1)]),
    ]


def stacks(hidden: int, rows: int) -> dict[str, tuple[Callable[[], list[Any]], Any, Any]]:
    """Returns what is measured: layers, their input, and the weights of their output's sum."""
    x, weights = paddle.randn([rows, hidden]), paddle.randn([rows, hidden])
    long = [rows // LENGTH, LENGTH, hidden]
    wide, tall = x.reshape(long), weights.reshape(long)
    words = paddle.randint(0, WORDS, [rows])
    side = 4 if rows == ROWS[0] else 8
    image, shares = (paddle.randn([8, hidden // 8, side * 2, side * 2]) for _ in range(2))
    for value in (x, wide, image):
        value.stop_gradient = False
    return {
        "4 Linear": (lambda: [nn.Linear(hidden, hidden) for _ in range(4)], x, weights),
        "4 LayerNorm": (lambda: [nn.LayerNorm(hidden) for _ in range(4)], x, weights),
        "Embedding": (lambda: [nn.Embedding(WORDS, hidden)], words, weights),
        "4 Conv2D": (
            lambda: [nn.Conv2D(hidden // 8, hidden // 8, 3, padding=1) for _ in range(4)],
            image,
            shares,
        ),
        "2 GPT blocks": (lambda: [gpt.Block(hidden, 8, LENGTH) for _ in range(2)], wide, tall),
    }


def main() -> None:
    """Measures and prints the table."""
    arguments = parser(__doc__, repeats=15).parse_args()
    figures = []
    for hidden in HIDDEN:
        for rows in ROWS:
            for name, stack in stacks(hidden, rows).items():
                title = f"{name}, {rows} x {hidden}"
                for figure in measured(*stack, arguments.repeats):
                    figures.append(figure._replace(name=f"{title}: {figure.name}"))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
