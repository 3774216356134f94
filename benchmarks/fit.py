"""What ``fleetpipe.Model.fit`` adds to a step, beside the same step of a ``train_batch`` loop.

    OMP_NUM_THREADS=1 python benchmarks/fit.py

The two take turns, step by step, on one model in one process: what the machine does meanwhile meets
both. Each pair gives a ratio of processor time.
Beside them stands what a step of ``fit`` spends outside of ``train_batch``: where others use the
machine too, this says more than a ratio of two steps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

import fleetpipe
from benchmarks.figures import Figure, parser, report
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc

MICRO_BATCHES = 4
DEPTH = 4


class Case(NamedTuple):
    """A model and its batch."""

    hidden: int
    rows: int
    steps: int


CASES = {"tiny": Case(512, 64, 200), "normal": Case(1024, 256, 40)}


def model_of(case: Case) -> tuple[Any, list[paddle.Tensor]]:
    """Returns a prepared Model on two ranks that this process plays, and a batch."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    rows = case.rows // MICRO_BATCHES
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": rows}
    fleet.init(is_collective=True, strategy=strategy)
    sizes = [64, *[case.hidden] * DEPTH]
    layers: list[Any] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [LayerDesc(nn.Linear, wide, narrow), nn.functional.relu]
    model = fleetpipe.Model([*layers, LayerDesc(nn.Linear, case.hidden, 10)])
    numbers = np.random.default_rng(0)
    images = numbers.standard_normal((case.rows, 64)).astype("float32")
    labels = numbers.integers(0, 10, (case.rows, 1))
    return model, [paddle.to_tensor(images), paddle.to_tensor(labels)]


def pairs(case: Case, metrics: Any, warm_up: int = 5) -> list[tuple[float, float, float]]:
    """Returns processor seconds of the loop's step, of ``fit``'s, and outside of its own."""
    model, batch = model_of(case)
    sgd = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    plain = nn.CrossEntropyLoss()
    model.prepare(sgd, plain, metrics)
    fits_loss = model.network.loss_fn()
    steps: list[tuple[float, float, float]] = []
    train_batch = model.pipeline.train_batch
    inside = 0.0

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal inside
        begun = time.process_time()
        shares = train_batch(*args, **options)
        inside = time.process_time() - begun
        return shares

    object.__setattr__(model.pipeline, "train_batch", timed)

    def step() -> None:
        model.network.take_loss(plain)
        float(train_batch(batch, model.optimizer))
        model.network.take_loss(fits_loss)

    def batches() -> Iterator[list[paddle.Tensor]]:
        for _ in range(warm_up + case.steps):
            begun = time.process_time()
            step()
            middle = time.process_time()
            yield batch
            fits = time.process_time() - middle
            steps.append((middle - begun, fits, fits - inside))

    model.fit(batches(), verbose=0)
    fleet.shutdown()
    return steps[warm_up:]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, help="pairs of steps; default: by case")
    arguments = options.parse_args()
    figures = []
    for name, case in CASES.items():
        case = case._replace(steps=arguments.steps or case.steps)
        for title, metrics in (("no metrics", None), ("Accuracy", paddle.metric.Accuracy())):
            measured = pairs(case, metrics)
            for what, values in zip(("train_batch", "fit", "outside"), zip(*measured)):
                milliseconds = [1e3 * value for value in values]
                figures.append(Figure(f"{name}, {title}: {what}", milliseconds, "ms"))
            ratios = [fit / loop for loop, fit, _ in measured]
            figures.append(Figure(f"{name}, {title}: fit / train_batch", ratios))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
