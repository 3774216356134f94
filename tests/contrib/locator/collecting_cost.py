"""What collecting costs: ``python -m tests.contrib.locator.collecting_cost [WIDTH] [STEPS]``.

Steps of a small model in a pipeline of two stages, in one process, without and with collecting in
turn: what ``fleetpipe locate`` adds to the job that it runs, its start and the twin aside.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from fleetpipe.contrib.locator.collecting import collecting
from fleetpipe.contrib.locator.recorder import Recorder
from tests import pipelines
from tests.contrib.locator.right_programs import Loss, batch, descriptions, drawn
from tests.pipelines import adam, pipeline


def main(width: int, steps: int) -> None:
    """Prints the median of both, and their ratio."""
    program = drawn(0)._replace(
        axes=["pp"], blocks=4, width=width, norm="LayerNorm", tied=True, micro_batches=4, rows=16
    )
    with pipelines.job(2, 4, rows=16), tempfile.TemporaryDirectory() as folder:
        model = pipeline(descriptions(program), loss_fn=Loss())
        optimizer = adam(model)
        recorder = Recorder(Path(folder), steps + 1, 0)
        times: list[list[float]] = [[], []]
        for step in range(2 * steps):
            data = batch(program, step)
            with collecting(recorder) if step % 2 else nullcontext():
                begin = time.perf_counter()
                model.train_batch(data, optimizer)
                times[step % 2].append(1e3 * (time.perf_counter() - begin))
        plain, collected = (statistics.median(of[3:]) for of in times)
        print(f"width {width}: step {plain:.2f} ms, with collecting {collected:.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] or (256, 30)))
