"""Measures what a static pipeline adds to each run of a section, beside ``Executor.run``.

    python benchmarks/static.py [--layers 30] [--width 32] [--repeats 200]

One stage of so many Linear and relu layers is run: by Paddle's bare executor (nothing fed, kept or
fetched), by the pipeline's stage (feeds, what backward needs moved out and back, clearing), and as
a whole program by ``Executor.run``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import device_guard

from benchmarks.figures import Figure, parser, report
from fleetpipe import fleet
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.static import pipeline_of

ROWS, MICRO_BATCHES = 4, 4


def build(layers: int, width: int) -> Any:
    with device_guard("gpu:0"):
        value = paddle.static.data("x", [-1, width])
        for _ in range(layers):
            value = nn.functional.relu(nn.Linear(width, width)(value))
    with device_guard("gpu:1"):
        return paddle.mean(nn.Linear(width, 1)(value))


def times_of(run: Callable[[], object], repeats: int) -> list[float]:
    """Returns the microseconds of each call, after some that warm it up."""
    times = []
    for index in range(repeats + 10):
        start = time.perf_counter()
        run()
        if index >= 10:
            times.append((time.perf_counter() - start) * 1e6)
    return times


def section_times(
    pipeline: Any, feed: dict[str, np.ndarray], repeats: int
) -> dict[str, list[float]]:
    """Returns the times of stage 0's forward and backward, bare and by the pipeline."""
    stage = pipeline._compiled.stage
    runner = stage._runners[0]
    rows = feed["x"][:ROWS]
    place = paddle.CPUPlace()
    times: dict[str, list[float]] = {name: [] for name in ("F", "bare F", "B", "bare B")}
    clock = time.perf_counter
    with dynamic_mode():
        grads = {
            edge: tuple(paddle.ones([ROWS, rows.shape[1]]) for _ in tensors)
            for edge, tensors in runner.outputs.items()
        }
        stage.begin(lambda name, index, tensor: tensor.set(rows, place), 0)
        inner = {"F": runner.run_forward, "B": runner.backward.run}

        def timed(kind: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                start = clock()
                result = inner[kind](*args)
                times[f"bare {kind}"].append((clock() - start) * 1e6)
                return result

            return run

        runner.run_forward = timed("F")
        runner.backward = runner.backward._replace(run=timed("B"))
        for _ in range(repeats + 10):
            start = clock()
            stage.forward(0, 0, {})
            middle = clock()
            stage.backward(0, 0, grads)
            end = clock()
            stage.release(0, 0)
            times["F"].append((middle - start) * 1e6)
            times["B"].append((end - middle) * 1e6)
    return {name: values[10:] for name, values in times.items()}


def main() -> None:
    options = parser(__doc__, repeats=200)
    options.add_argument("--layers", type=int, default=30)
    options.add_argument("--width", type=int, default=32)
    args = options.parse_args()
    paddle.enable_static()
    paddle.seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {
        "accumulate_steps": MICRO_BATCHES,
        "micro_batch_size": ROWS,
    }
    fleet.init(is_collective=True, strategy=strategy)
    loss = build(args.layers, args.width)
    whole = paddle.static.default_main_program().clone()
    start = time.perf_counter()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
    built = time.perf_counter() - start
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    feed = {"x": np.ones((ROWS * MICRO_BATCHES, args.width), "float32")}
    exe.run(feed=feed, fetch_list=[loss])
    times = section_times(pipeline_of(), feed, args.repeats)
    times["Executor.run, forward of all"] = times_of(
        lambda: exe.run(whole, feed={"x": feed["x"][:ROWS]}), args.repeats
    )
    times["a whole step"] = times_of(lambda: exe.run(feed=feed), args.repeats)
    fleet.shutdown()
    for kind in "FB":
        pairs = zip(times[kind], times[f"bare {kind}"])
        times[f"of {kind} the pipeline's part"] = [whole - bare for whole, bare in pairs]
    figures = [Figure(name, values, "us") for name, values in times.items()]
    report([Figure("minimize", [built], "s"), *figures], args.json)


if __name__ == "__main__":
    main()
