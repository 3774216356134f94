"""What ``fleetpipe.Model.fit`` adds to a step, beside the same step of a ``train_batch`` loop.

    OMP_NUM_THREADS=1 python benchmarks/fit.py

The two take turns, step by step, on one model in one process: what the machine does meanwhile meets
both. Each pair gives a ratio of processor time; the median and the middle half of them are printed.
Beside them stands what a step of ``fit`` spends outside of ``train_batch``: where others use the
machine too, this says more than a ratio of two steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

import fleetpipe
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
    for wide, narrow in zip(sizes, sizes[1:]):
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
    found: list[tuple[float, float, float]] = []
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
            found.append((middle - begun, fits, fits - inside))

    model.fit(batches(), verbose=0)
    fleet.shutdown()
    return found[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(description="The overhead of Model.fit.")
    parser.add_argument("--steps", type=int, help="pairs of steps; default: by case")
    args = parser.parse_args()
    heads = f"{'case':8} {'metrics':9} {'train_batch':>12} {'fit':>10} {'ratio':>7}"
    print(f"{heads}  middle half     outside")
    for name, case in CASES.items():
        case = case._replace(steps=args.steps or case.steps)
        for metrics in (None, paddle.metric.Accuracy()):
            found = pairs(case, metrics)
            loop, fit, outside = (statistics.median(column) * 1e3 for column in zip(*found))
            low, middle, high = statistics.quantiles([b / a for a, b, _ in found], n=4)
            what = "none" if metrics is None else "Accuracy"
            row = f"{name:8} {what:9} {loop:9.2f} ms {fit:7.2f} ms {middle:7.4f}"
            print(f"{row}  {low:.3f} to {high:.3f} {outside:8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
